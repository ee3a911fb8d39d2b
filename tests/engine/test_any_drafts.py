"""Any drafts or none, any requests, any interruptions: tokens and reasons as of one left alone.

A proposal is a list of (which parent, what token): parents by their distance back, tokens right for
their depth, wrong, or in no vocabulary."""

import functools
import itertools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.data.text import StopTexts
from rhymeflow.engine.base import Request, Segment
from rhymeflow.engine.native.cache import FIRST_CAPACITY
from rhymeflow.histospec.draft import Draft
from tests.engine.drafters import VOCABULARY, FakeDrafter
from tests.engine.models import HOWS, make_engine, make_requests, run, sampling, tiny_model

TOLERANCE = {torch.float32: 0.0, torch.float64: 1e-12}
"""To the last bit where the compiled kernel computes: the shape of a draft is in no sum."""
LONGEST = 24
POOL = (3, 3, 17, 1, 9, 245)
"""Two prompts come twice, one is a single token, and the longest outgrows its first size class."""
nodes = st.tuples(st.integers(0, 3), st.sampled_from(["right", "wrong", "none", "below none"]))
proposals = st.lists(nodes, max_size=12)
scripts = st.lists(proposals, min_size=1, max_size=5)
texts = st.lists(st.tuples(st.integers(0, LONGEST - 1), st.integers(1, 4)), max_size=2)
"""Places in what is said, and lengths."""
wanted = st.tuples(
    st.integers(0, len(POOL) - 1),
    st.sampled_from(sorted(HOWS)),
    st.integers(1, LONGEST),
    st.sets(st.integers(0, LONGEST - 1), max_size=2),
    texts,
    st.booleans(),
)
moves_made = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=4)),
    max_size=6,
)


class Moves:
    """Two engines, drafted or not, and what segments the moves between them must lead to."""

    def __init__(self, dtype, draft, answers, **options):
        self.engines = {}
        for i, name in enumerate("ab"):
            places = options["max_num_seqs"]
            drafter = None if draft is None else FakeDrafter(draft, answers, i, places)
            self.engines[name] = make_engine(
                model_of(dtype), instance=name, drafter=drafter, **options
            )
        self.at, self.stays, self.reasons = {}, {}, {}

    def submit(self, request, name):
        self.at[request.id] = name
        self.stays.setdefault(request.id, []).append((len(request.tokens), name))
        self.engines[name].submit(request)

    def step(self):
        for engine in self.engines.values():
            self.reasons.update({request.id: reason for request, reason in engine.step()})
            held = [each.held for each in engine._sequences.values() if each.held]
            assert len(held) < 2 or sum(held) <= (engine._kv_capacity or sys.maxsize)
            slots = [each.slot for each in engine._sequences.values() if each.slot is not None]
            for slot in slots:
                assert slot.size_class.capacity < max(FIRST_CAPACITY + 1, 2 * slot.length)
            for size_class in engine._cache.size_classes.values():
                assert size_class.kv.isfinite().all(), "also beyond what is cached"

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
def model_of(dtype):
    return tiny_model().to(dtype)


@functools.cache
def whole_answers(how, dtype):
    """Each request of the pool to the greatest length, undrafted."""
    requests = make_requests(POOL, sampling(max_new_tokens=LONGEST, **HOWS[how]))
    run(make_engine(model_of(dtype)), requests)
    return requests


def decode(tokens, skip_special_tokens=True):
    """A letter for most tokens; some are half of one."""
    halves = {0: b"\xc3", 1: b"\xa9"}
    parts = [halves.get(each % 9, b"%c" % (97 + each % 7)) for each in tokens]
    return b"".join(parts).decode(errors="replace")


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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=60)
@given(
    st.none() | scripts,
    st.lists(wanted, min_size=1, max_size=6, unique_by=lambda w: w[0]),
    moves_made,
    st.integers(1, 8),
    st.sampled_from([None, 30, 100_000]),
)
def test_any_drafts_any_requests_any_moves(dtype, scripts, mix, generated, places, capacity):
    requests, expected, answers = [], {}, {}
    for which, how, most, stops, stop_texts, is_urgent in mix:
        whole = whole_answers(how, dtype)[which]
        stop = {whole.tokens[place] for place in stops}
        ends = [place + 1 for place, token in enumerate(whole.tokens) if token in stop]
        said = decode(whole.tokens)
        words = [each for place, size in stop_texts if (each := said[place : place + size])]
        length = range(1, LONGEST + 1)
        ends += [n for n in length if any(each in decode(whole.tokens[:n]) for each in words)]
        end = min([most, *ends])
        reason = "stop" if end in ends else "length"
        expected[which] = (whole.tokens[:end], whole.logprobs[:end], reason)
        answers[tuple(whole.prompt_ids), whole.noise_key.sample] = whole.tokens
        options = sampling(max_new_tokens=most, stop=stop, **HOWS[how])
        request = Request(which, whole.prompt_ids, whole.noise_key, options, is_urgent=is_urgent)
        request.accepted = bytearray()
        request.stop_texts = StopTexts(decode, words) if words else None
        requests.append(request)
    draft = None if scripts is None else scripted(scripts)
    sizes = {"max_prefill_tokens": 11, "max_num_seqs": places, "kv_capacity": capacity}
    moves = Moves(dtype, draft, answers, **sizes)
    for request in sorted(requests, key=lambda request: request.is_urgent):
        moves.submit(request, "a")
        moves.step()  # so that the others have all places when the urgent ones come
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
        due = pytest.approx(logprobs[len(tokens) - known :], rel=0, abs=TOLERANCE[dtype])
        assert request.logprobs == due
        assert request.segments == moves.segments(request)
        assert len(request.accepted) == known > 0
        # An iteration ends with a token that nobody drafted, but for a drafted one that stops.
        own, is_stopped = request.accepted.count(0), reason == "stop" and request.accepted[-1]
        assert known < len(tokens) or own == request.steps - is_stopped
