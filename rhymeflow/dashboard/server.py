"""The web server of the dashboard: access control, routes and parameters.

It accepts only `GET` requests with the token of this start and from its own pages, and only its own
host names, because a hostile page could point another name at this machine. Its pages cannot load
from other servers or send data there. The response to a mistake is one line of JSON."""

from __future__ import annotations

import hmac
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard import about, groups, log, time_view, views
from rhymeflow.dashboard.run import Run
from rhymeflow.errors import UserError
from rhymeflow.observe import query
from rhymeflow.observe.query import TokenTexts

COOKIE = "rhymeflow-dashboard"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

STATIC = Path(__file__).parent / "static"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})


class Guard(BaseHTTPMiddleware):
    """Passes on requests that have the token and come from these pages."""

    def __init__(self, app: ASGIApp, token: str, hosts: frozenset[str] | None) -> None:
        super().__init__(app)
        self._token, self._hosts = token, hosts

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """Refuse the request or pass it on."""
        response = self._refused(request) or await call_next(request)
        response.headers.update(HEADERS)
        return response

    def _refused(self, request: Request) -> Response | None:
        """The answer to a request that may not pass."""
        host = re.sub(r":\d*$", "", request.headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            return PlainTextResponse(f"no page of the host {host!r} is here", 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("nothing can be changed here", 405)
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return PlainTextResponse("not for other pages", 403)
        given = request.query_params.get("token")
        if given is not None and self._is_right(given):
            # The browser then shows an address without the token.
            response = RedirectResponse(request.url.remove_query_params("token").path, 303)
            response.set_cookie(COOKIE, given, httponly=True, samesite="strict")
            return response
        if not self._is_right(request.cookies.get(COOKIE, "")):
            return PlainTextResponse(
                "open the address that `rhymeflow dashboard` printed, with its token", 403
            )
        return None

    def _is_right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())


Answer = Callable[[Run, Request], Any]


def make_app(
    runs: Sequence[Run], texts: TokenTexts, *, token: str, hosts: frozenset[str] | None = LOOPBACK
) -> Starlette:
    """Return the application. `hosts`: names under which it may be asked; `None`: any."""
    known = {run.name: run for run in runs}
    advisor = views.Advisor()

    def named(name: str) -> Run:
        if name not in known:
            raise UserError(f"there is no run {name!r} here; there are {', '.join(known)}")
        return known[name]

    def differences(request: Request) -> Any:
        chosen = [named(name) for name in request.query_params.getlist("run")]
        return query.differences([query.fields_of(run.directory) for run in chosen])

    def meanings(request: Request) -> Any:
        return views.meanings(request.query_params.getlist("name"))

    def advice(run: Run, request: Request) -> Any:
        return advisor.found(run, anew=request.query_params.get("anew") == "true")

    def response(run: Run, request: Request) -> Any:
        group, member = (_group_number(request.path_params, n) or 0 for n in ("group", "member"))
        return views.response(run, TrajectoryId(group, member), texts)

    answers: dict[str, Answer] = {
        "": lambda run, request: views.overview(run),
        "/metrics": lambda run, request: views.metrics(run, request.query_params.getlist("name")),
        "/time": _time,
        "/groups": lambda run, request: groups.listed(run, _group_query(request)),
        "/groups/{group}": lambda run, request: views.group(
            run, _group_number(request.path_params) or 0
        ),
        "/trajectories/{group}/{member}": response,
        "/drafts": lambda run, request: views.drafts(run),
        "/log": lambda run, request: log.listed(run, _log_query(request)),
        "/advice": advice,
        "/about": lambda run, request: about.about(run),
        "/outputs": lambda run, request: about.outputs(run),
        "/outputs/{attempt}/{worker}": lambda run, request: about.output(
            run, "{attempt}/{worker}".format(**request.path_params)
        ),
    }

    def asked(answer: Answer) -> Callable[[Request], Response]:
        return _json(lambda request: answer(named(request.path_params["run"]), request))

    listed = [{"name": run.name, "directory": str(run.directory)} for run in runs]
    routes = [
        Route("/api/runs", _json(lambda request: listed)),
        Route("/api/differences", _json(differences)),
        Route("/api/meanings", _json(meanings)),
        *(Route(f"/api/runs/{{run}}{path}", asked(each)) for path, each in answers.items()),
        Route("/", lambda request: FileResponse(STATIC / "index.html")),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    guard = Middleware(Guard, token=token, hosts=hosts)
    return Starlette(routes=routes, middleware=[guard])


def _time(run: Run, request: Request) -> Any:
    return time_view.found(run, *(_seconds(request.query_params, name) for name in ("from", "to")))


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """An endpoint that sends the JSON of `answer`. Starlette runs it in a thread."""

    def endpoint(request: Request) -> Response:
        try:
            found, status = answer(request), 200
        except UserError as error:
            found, status = {"error": str(error)}, 400
        return Response(msgspec.json.encode(found), status, media_type="application/json")

    return endpoint


def _group_query(request: Request) -> groups.GroupQuery:
    given = request.query_params
    return groups.GroupQuery(
        step=_number(given, "step"),
        row=_number(given, "row"),
        filters=tuple(given.getlist("filter")),
        text=given.get("text", ""),
        component=given.get("component", ""),
        of_component=given.get("of", "mixed"),
        sort=given.get("sort", "order"),
        descending=given.get("descending") == "true",
        offset=_number(given, "offset") or 0,
    )


def _log_query(request: Request) -> log.LogQuery:
    given = request.query_params
    after = given.get("after", "")
    parts = [_number({"after": each}, "after") or 0 for each in after.split(",")]
    if after and len(parts) != 3:
        raise UserError(f"after = {after!r}: is no place in the log")
    return log.LogQuery(
        kind=given.get("kind", ""),
        group=_group_number(given),
        instance=given.get("instance", ""),
        text=given.get("text", ""),
        time=_seconds(given, "time"),
        after=(parts[0], parts[1], parts[2]) if after else None,
    )


def _seconds(given: Mapping[str, str], name: str) -> float | None:
    if not (text := given.get(name)):
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or found < 0:
        raise UserError(f"{name} = {text!r}: is no number of seconds")
    return found


def _number(given: Mapping[str, str], name: str, form: str = r"\d{1,18}") -> int | None:
    """The whole number that is given; None where nothing is."""
    text = given.get(name, "")
    if text and not re.fullmatch(form, text):
        raise UserError(f"{name} = {text!r}: is no number")
    return int(text) if text else None


def _group_number(given: Mapping[str, str], name: str = "group") -> int | None:
    """Groups of suites are numbered from -1 down."""
    return _number(given, name, r"-?\d{1,18}")
