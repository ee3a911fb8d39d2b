"""Any drafts or none, any requests, any interruptions: tokens and reasons as of one left alone.

A proposal is a list of (which parent, what token): parents by their distance back, tokens right for
their depth, wrong, or in no vocabulary.
"""

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.engine.base import Request, Segment
from rhymeflow.histospec.draft import Draft
from tests.engine.drafters import FakeDrafter
from tests.engine.exactness import HOWS, model_of
from tests.engine.models import VOCABULARY, make_engine, make_requests, run, sampling

LONGEST = 24
POOL = (3, 3, 17, 1, 9, 40)
nodes = st.tuples(st.integers(0, 3), st.sampled_from(["right", "wrong", "none", "below none"]))
proposals = st.lists(nodes, max_size=12)
scripts = st.lists(proposals, min_size=1, max_size=5)
wanted = st.tuples(
    st.integers(0, len(POOL) - 1),
    st.sampled_from(sorted(HOWS)),
    st.integers(1, LONGEST),
    st.sets(st.integers(0, LONGEST - 1), max_size=2),
)
moves_made = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=4)),
    max_size=6,
)


class Moves:
    """Two engines, drafted or not, and what segments the moves between them must lead to."""

    def __init__(self, draft, answers, **options):
        self.engines = {}
        for i, name in enumerate("ab"):
            drafter = None if draft is None else FakeDrafter(draft, answers, seed=i)
            self.engines[name] = make_engine(
                model_of("float32"), instance=name, drafter=drafter, **options
            )
        self.at, self.stays, self.reasons = {}, {}, {}

    def submit(self, request, name):
        self.at[request.id] = name
        self.stays.setdefault(request.id, []).append((len(request.tokens), name))
        self.engines[name].submit(request)

    def step(self):
        for engine in self.engines.values():
            self.reasons.update({request.id: reason for request, reason in engine.step()})

    def move(self, chosen):
        """Interrupt (id, whether to go elsewhere) and submit again what is not complete."""
        for key, is_elsewhere in chosen:
            name = self.at[key]
            for request in self.engines[name].interrupt([key, "never heard of"]):
                if is_elsewhere:  # only the tokens move along, as through the trajectory store
                    request.logprobs, request.accepted = [], bytearray()
                self.submit(request, "ba"[name == "b"] if is_elsewhere else name)

    def finish(self):
        while any(engine.has_work for engine in self.engines.values()):
            self.step()
        for engine in self.engines.values():
            assert engine._drafting.drafter is None or not engine._drafting.drafter.texts
            assert engine.kv_tokens == 0
            assert not any(each.slots for each in engine._cache.size_classes.values())
        return self.reasons

    def segments(self, request):
        """By the direct rule: a segment where a stay elsewhere generated something."""
        stays = [*self.stays[request.id], (len(request.tokens), None)]
        generated = [
            (start, name) for (start, name), (end, _) in itertools.pairwise(stays) if end > start
        ]
        found = [Segment(start, 0, name) for start, name in generated]
        same = [i for i in range(1, len(found)) if found[i].instance == found[i - 1].instance]
        return [segment for i, segment in enumerate(found) if i not in same]


@functools.cache
def whole_answers(how):
    """Each request of the pool to the greatest length, undrafted."""
    requests = make_requests(POOL, sampling(max_new_tokens=LONGEST, **HOWS[how]))
    run(make_engine(model_of("float32")), requests)
    return requests


def scripted(scripts):
    """The proposals in turn, whichever responses ask."""
    turns = itertools.cycle(scripts)

    def draft(answer, at, room, rng):
        generated, depth = Draft([], []), {-1: 0}
        for node, (back, kind) in enumerate(next(turns)):
            parent = max(-1, node - 1 - back)
            depth[node] = depth[parent] + 1
            place = at + depth[node] - 1
            known = answer[place] if place < len(answer) else 0
            token = {"right": known, "wrong": (known + 1 + node) % VOCABULARY}
            generated.tokens.append(token.get(kind, VOCABULARY if kind == "none" else -1))
            generated.parents.append(parent)
        return generated

    return draft


@settings(max_examples=40)
@given(
    st.none() | scripts,
    st.lists(wanted, min_size=1, max_size=6, unique_by=lambda w: w[0]),
    moves_made,
    st.integers(1, 8),
)
def test_any_drafts_any_requests_any_moves(scripts, mix, generated, places):
    requests, expected, answers = [], {}, {}
    for which, how, most, stops in mix:
        whole = whole_answers(how)[which]
        stop = {whole.tokens[place] for place in stops}
        ends = [place + 1 for place, token in enumerate(whole.tokens) if token in stop]
        end = min([most, *ends])
        reason = "stop" if end in ends else "length"
        expected[which] = (whole.tokens[:end], whole.logprobs[:end], reason)
        answers[tuple(whole.prompt_ids), whole.noise_key.sample] = whole.tokens
        options = sampling(max_new_tokens=most, stop=stop, **HOWS[how])
        requests.append(
            Request(which, whole.prompt_ids, whole.noise_key, options, accepted=bytearray())
        )
    draft = None if scripts is None else scripted(scripts)
    moves = Moves(draft, answers, max_prefill_tokens=11, max_num_seqs=places)
    for request in requests:
        moves.submit(request, "a")
    for steps, chosen in generated:
        for _ in range(steps):
            moves.step()
        present = {request.id for request in requests}
        moves.move([(key, is_elsewhere) for key, is_elsewhere in chosen if key in present])
    reasons = moves.finish()
    for request in requests:
        tokens, logprobs, reason = expected[request.id]
        assert (request.tokens, reasons[request.id]) == (tokens, reason)
        known = len(request.logprobs)
        assert request.logprobs == pytest.approx(logprobs[len(tokens) - known :], abs=2e-5)
        assert request.segments == moves.segments(request)
        assert len(request.accepted) == known > 0
        # An iteration ends with a token that nobody drafted, but for a drafted one that stops.
        own, is_stopped = request.accepted.count(0), reason == "stop" and request.accepted[-1]
        assert known < len(tokens) or own == request.steps - is_stopped
