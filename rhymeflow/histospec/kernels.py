"""The compiled code of the index: storing, chaining and finding text.

Text is stored in blocks of 32 words: six words of header, then 26 tokens. The blocks of a response
are linked, so several responses can grow at the same time. Blocks are numbered from 1 in the order
of allocation; block n is stored in place n modulo the number of places, so new text overwrites the
oldest. A *position* is (number of the block) * 32 + (word in it) and is never reused.

For each level, `heads` holds the newest position at which a given suffix of tokens ends (by hash of
the suffix, and of the prompt at levels of one prompt's text), and `links` the next older position
in its chain. Tables hold positions modulo 2**32.

While a writer in another process changes the index:
- readers follow block numbers, never places, so they notice when a block was overwritten;
- every walk ends: chains are followed for `_STEPS` links, and block numbers strictly rise or fall
  along a response;
- a value read from shared memory is used as a position only after a check against the counters,
  which a reader reads once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from rhymeflow.cpu.tiles import prefetch

# Words of a block: its number, its response, the blocks before and after it, its number of tokens.
BLOCK_WORDS = 32
NUMBER, RESPONSE, PREVIOUS, NEXT, COUNT = 0, 1, 2, 3, 4
FIRST_WORD = 6  # of the tokens
BLOCK_TOKENS = BLOCK_WORDS - FIRST_WORD

# Words of the header.
NEXT_BLOCK, NEXT_RESPONSE, NUM_TOKENS = 0, 1, 2

# Words of a response's record. LENGTH includes the prompt's tail, of TAIL tokens.
RECORD_WORDS = 12
OF_RESPONSE, OF_PROMPT, OF_SAMPLE, OF_NOISE, LENGTH, TAIL, FIRST, LAST, EARLIER, FINISHED = range(
    10
)

# Suffix lengths in the order in which they are tried, and the text that shares a chain: of all
# prompts, of one prompt, or of the responses with one prompt, sample and noise.
OF_ALL, OF_THE_PROMPT, OF_ITSELF = 0, 1, 2
LEVELS = (6, 4, 2, 1, 1)
SCOPES = (OF_THE_PROMPT, OF_ALL, OF_THE_PROMPT, OF_ITSELF, OF_ALL)
NUM_LEVELS = 5
LONGEST_LEVEL = 6

MEMORY = 64  # tokens remembered of each sequence
LONGEST_MATCH = 32
FOUND = 20  # most candidates found by suffix
ALIGNED = 2  # most candidates by position
PLACES = FOUND + ALIGNED
ENOUGH = 12  # with so many candidates, shorter suffixes are not tried
KEPT = 4  # with so many candidates left, there is no new search
STALE_AFTER = 32  # tokens after which there is a new search in any case

INDEXES = 2
# Origins of candidates: another prompt, the prompt, the sequence itself, an aligned response.
KIND_SHARED, KIND_OWN, KIND_SELF, KIND_ALIGNED = 0, 1, 2, 3

_LOW = 0xFFFFFFFF
_BUCKET_WALK = 256  # responses looked at for one prompt
_SIBLINGS = 64  # responses whose rewards are compared
_STEPS = 12  # positions looked at in one chain

kernel = njit(cache=True, nogil=True, error_model="numpy")
# No reference counting, which takes longer than the work; these functions create no arrays.
inner = njit(cache=True, nogil=True, error_model="numpy", _nrt=False)
# Inlined: passing a tuple of arrays takes longer than the work on one position.
inlined = njit(cache=True, nogil=True, error_model="numpy", _nrt=False, forceinline=True)


@inner
def _base(arrays, number):
    return (number % (arrays.words.shape[0] // BLOCK_WORDS)) * BLOCK_WORDS


@inner
def _mixed(value):
    value = (value ^ (value >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    return value ^ (value >> np.uint64(29))


@inner
def _key(state, prompt, itself, level):
    """Return the key of a suffix's chain; `state` is the hash of the suffix."""
    value = state + np.uint64(level + 1) * np.uint64(0xD6E8FEB86659FD93)
    if SCOPES[level] == OF_THE_PROMPT:
        value ^= np.uint64(prompt)
    elif SCOPES[level] == OF_ITSELF:
        value ^= itself
    return _mixed(value)


@inner
def _bucket(key, heads):
    """Return the place in `heads` at which the chain begins."""
    return np.int64(key & np.uint64(heads.shape[1] - 1))


@inner
def itself(prompt, sample, noise_epoch):
    """Return the key of the responses with this prompt, sample and noise."""
    value = _mixed(np.uint64(prompt) + _mixed(np.uint64(sample + 1)))
    return _mixed(value + np.uint64(noise_epoch + 2))


# ---- writing


@inner
def begin(arrays, prompt, tail_length, sample, noise_epoch):
    """Add a response; its first `tail_length` tokens will be its prompt's last ones."""
    header, records = arrays.header, arrays.records
    response = header[NEXT_RESPONSE]
    slot = response % records.shape[0]
    bucket = prompt % arrays.prompts.shape[0]
    records[slot, OF_RESPONSE] = 0
    records[slot, OF_PROMPT] = prompt
    records[slot, OF_SAMPLE] = sample
    records[slot, OF_NOISE] = noise_epoch
    records[slot, LENGTH] = 0
    records[slot, TAIL] = tail_length
    records[slot, FIRST] = 0
    records[slot, LAST] = 0
    records[slot, EARLIER] = arrays.prompts[bucket]
    records[slot, FINISHED] = 0
    arrays.rewards[slot] = np.nan
    arrays.merits[slot] = 1.0
    records[slot, OF_RESPONSE] = response
    header[NEXT_RESPONSE] = response + 1
    arrays.prompts[bucket] = response
    return response


@kernel
def append_many(arrays, responses, tokens, offsets):
    """Append tokens[offsets[i]:offsets[i + 1]] to response i, for all i. All tokens are stored
    before any is chained, so that prefetches overlap."""
    buckets = np.empty((offsets[-1] + 1, NUM_LEVELS), np.int64)
    positions = np.empty(offsets[-1] + 1, np.int64)
    count = 0
    for i in range(responses.shape[0]):
        start, stop = offsets[i], offsets[i + 1]
        count = _append(arrays, responses[i], tokens, start, stop, buckets, positions, count)
    for i in range(count):
        _chain(arrays, positions[i], buckets[i])


@inner
def _append(arrays, response, tokens, start, stop, buckets, positions, stored):
    """Store tokens and write their positions and buckets from `stored` on; return the new count."""
    words, records = arrays.words, arrays.records
    slot = response % records.shape[0]
    if records[slot, OF_RESPONSE] != response:
        return stored
    number = records[slot, LAST]
    base = _base(arrays, number)
    if number != 0 and words[base + NUMBER] != number:
        return stored  # overwritten
    prompt = records[slot, OF_PROMPT]
    own = itself(prompt, records[slot, OF_SAMPLE], records[slot, OF_NOISE])
    for i in range(start, stop):
        if number == 0 or words[base + COUNT] == BLOCK_TOKENS:
            number = _allocate(arrays, response, number)
            base = _base(arrays, number)
            records[slot, LAST] = number
            if records[slot, FIRST] == 0:
                records[slot, FIRST] = number
        word = FIRST_WORD + words[base + COUNT]
        words[base + word] = tokens[i]
        words[base + COUNT] += 1
        records[slot, LENGTH] += 1
        arrays.header[NUM_TOKENS] += 1
        # A prompt's tokens are proposed to its own responses only.
        is_prompt = records[slot, LENGTH] < records[slot, TAIL]
        _choose(arrays, prompt, own, number, base, word, is_prompt, buckets[stored])
        positions[stored] = number * BLOCK_WORDS + word
        stored += 1
    return stored


@inner
def _allocate(arrays, response, previous):
    """Allocate the oldest block as the continuation of block `previous` (0: none)."""
    header, words = arrays.header, arrays.words
    number = header[NEXT_BLOCK]
    base = _base(arrays, number)
    header[NUM_TOKENS] -= words[base + COUNT]
    words[base + NUMBER] = 0
    words[base + RESPONSE] = response
    words[base + PREVIOUS] = previous
    words[base + NEXT] = 0
    words[base + COUNT] = 0
    words[base + NUMBER] = number
    header[NEXT_BLOCK] = number + 1
    if previous != 0:
        words[_base(arrays, previous) + NEXT] = number
    return number


@inlined
def _choose(arrays, prompt, own, number, base, word, is_prompt, buckets):
    """Write the buckets of the suffixes that end with this token, by level; -1: none."""
    words = arrays.words
    buckets[:] = -1
    state = np.uint64(0)
    for length in range(1, LONGEST_LEVEL + 1):
        state = _mixed(state ^ np.uint64(words[base + word] + 1))
        for level in range(NUM_LEVELS):
            if LEVELS[level] == length and (SCOPES[level] != OF_ALL or not is_prompt):
                bucket = _bucket(_key(state, prompt, own, level), arrays.heads)
                prefetch(arrays.heads, level * arrays.heads.shape[1] + bucket)
                buckets[level] = bucket
        word -= 1
        if word < FIRST_WORD:
            previous = np.int64(words[base + PREVIOUS])
            base = _base(arrays, previous)
            if previous == 0 or words[base + NUMBER] != previous:
                return
            word = BLOCK_WORDS - 1


@inlined
def _chain(arrays, position, buckets):
    """Put a position at the front of its chains."""
    place = _base(arrays, position // BLOCK_WORDS) + position % BLOCK_WORDS
    for level in range(NUM_LEVELS):
        if buckets[level] >= 0:
            arrays.links[level, place] = arrays.heads[level, buckets[level]]
            arrays.heads[level, buckets[level]] = np.uint32(position & _LOW)


@kernel
def finish(arrays, response, reward):
    """Finish a response; set the merits of the prompt's responses by comparing their rewards."""
    records, rewards = arrays.records, arrays.rewards
    slot = response % records.shape[0]
    if records[slot, OF_RESPONSE] != response:
        return
    records[slot, FINISHED] = 1
    rewards[slot] = reward
    if np.isnan(reward):
        return
    prompt = records[slot, OF_PROMPT]
    slots = np.empty(_SIBLINGS, np.int64)
    count, total, squares = 0, 0.0, 0.0
    at = arrays.prompts[prompt % arrays.prompts.shape[0]]
    for _ in range(_BUCKET_WALK):
        place = at % records.shape[0]
        if at == 0 or records[place, OF_RESPONSE] != at:
            break
        if records[place, OF_PROMPT] == prompt and not np.isnan(rewards[place]):
            slots[count] = place
            total += rewards[place]
            squares += rewards[place] * rewards[place]
            count += 1
            if count == _SIBLINGS:
                break
        at = records[place, EARLIER]
    mean = total / count
    deviation = np.sqrt(max(squares / count - mean * mean, 0.0))
    for i in range(count):
        over = (rewards[slots[i]] - mean) / deviation if deviation > 1e-6 else 0.0
        arrays.merits[slots[i]] = 2.0 ** min(max(over, -2.0), 2.0)


# ---- reading


class Text(NamedTuple):
    """The valid blocks of an index when a reader begins."""

    words: np.ndarray
    places: int  # most blocks at a time
    first: int  # number of the oldest valid block
    end: int  # number of the newest block plus 1
    lap: int  # number of the newest block in place 0


@inner
def _text(arrays):
    places, end = arrays.words.shape[0] // BLOCK_WORDS, arrays.header[NEXT_BLOCK]
    first = max(1, end - places)
    return Text(arrays.words, places, first, end, (end - 1) // places * places)


@inner
def _is_there(text, number):
    return text.first <= number < text.end


@inlined
def _start(text, number):
    """Return the index in `words` of a valid block's first word."""
    place = number - text.lap
    return (place if place >= 0 else place + text.places) * BLOCK_WORDS


@inlined
def _place(text, position):
    """Return the index in `words` of a position in a valid block."""
    return _start(text, position // BLOCK_WORDS) + position % BLOCK_WORDS


@inlined
def _restored(text, low):
    """Return the position whose low 32 bits a table holds; 0: it is not valid any more."""
    end = text.end * BLOCK_WORDS
    position = end - ((end - np.int64(low)) & _LOW)
    is_there = low != 0 and text.first * BLOCK_WORDS <= position < end
    return position if is_there else np.int64(0)


@inner
def _next(text, number):
    """Return the number of the block that continues a valid one; 0: none."""
    following = np.int64(text.words[_start(text, number) + NEXT])
    if following <= number or following >= text.end:
        return np.int64(0)
    return following if text.words[_start(text, following) + NUMBER] == following else np.int64(0)


@inlined
def _copy_after(text, position, out, most):
    """Copy at most `most` tokens that follow a valid position; return how many were copied."""
    words, most = text.words, min(most, out.shape[0])
    number, word = position // BLOCK_WORDS, position % BLOCK_WORDS + 1
    copied = 0
    while True:
        base = _start(text, number)
        stop = min(FIRST_WORD + np.int64(words[base + COUNT]), BLOCK_WORDS, word + most - copied)
        for place in range(base + word, base + stop):
            out[copied] = words[place]
            copied += 1
        if copied == most or stop < BLOCK_WORDS:
            return copied
        number, word = _next(text, number), FIRST_WORD
        if number == 0:
            return copied


@inner
def _moved(text, position, steps):
    """Return the position `steps` tokens after a valid one; 0: the text ends before that."""
    number, word = position // BLOCK_WORDS, position % BLOCK_WORDS
    while word + steps >= BLOCK_WORDS:
        steps -= BLOCK_WORDS - word
        number, word = _next(text, number), FIRST_WORD
        if number == 0:
            return np.int64(0)
    if word + steps - FIRST_WORD >= text.words[_start(text, number) + COUNT]:
        return np.int64(0)
    return number * BLOCK_WORDS + word + steps


@inner
def _agreement(text, position, recent, most):
    """Count the tokens up to a valid position that equal the end of `recent`, at most `most`."""
    words = text.words
    number, word = position // BLOCK_WORDS, position % BLOCK_WORDS
    base = _start(text, number)
    matched = 0
    while matched < most and words[base + word] == recent[MEMORY - 1 - matched]:
        matched += 1
        word -= 1
        if word < FIRST_WORD:
            previous = np.int64(words[base + PREVIOUS])
            if previous < text.first or previous >= number:
                break
            number, word, base = previous, BLOCK_WORDS - 1, _start(text, previous)
            if words[base + NUMBER] != number:
                break
    return matched


@inner
def _followed(text, position, recent, num_new):
    """Return the position `num_new` tokens on, if those are the last ones of `recent`; else 0."""
    moved = _moved(text, position, num_new)
    if moved != 0 and _agreement(text, moved, recent, num_new) == num_new:
        return moved
    return np.int64(0)


@inner
def align(arrays, prompt, sample, noise_epoch, length, at):
    """Fill `at` with positions in the newest finished responses of this prompt, sample and noise.
    Each is the position of the token before the response's token number `length`, from 0. Returns
    their number."""
    records, text = arrays.records, _text(arrays)
    count = 0
    response = arrays.prompts[prompt % arrays.prompts.shape[0]]
    for _ in range(_BUCKET_WALK):
        slot = response % records.shape[0]
        if response < 1 or records[slot, OF_RESPONSE] != response:
            return count
        is_same = records[slot, OF_PROMPT] == prompt and records[slot, OF_SAMPLE] == sample
        if is_same and records[slot, OF_NOISE] == noise_epoch and records[slot, FINISHED] == 1:
            first, before = records[slot, FIRST], records[slot, TAIL] + length - 1
            position = np.int64(0)
            if _is_there(text, first):
                position = _moved(text, first * BLOCK_WORDS + FIRST_WORD, before)
            if position != 0 and count < at.shape[0]:
                at[count] = position
                count += 1
        earlier = records[slot, EARLIER]
        if earlier >= response:
            return count
        response = earlier
    return count


class Work(NamedTuple):
    """Scratch memory of a search for n sequences."""

    keys: np.ndarray  # uint64 [n, NUM_LEVELS]: of the suffixes of the sequences in `rows`
    rows: np.ndarray  # int64 [n]: the sequences for which there is a new search
    limits: np.ndarray  # int64 [n]: most candidates of a sequence after this level
    most: np.ndarray  # int64 [n]: most candidates of a sequence after this chain
    sequence: np.ndarray  # int64 [n]: sequences whose chain is being followed
    at: np.ndarray  # int64 [n]: the next position in each of these chains


@inner
def collect(live, history, contexts, candidates, handles, most, stops, texts, work):
    """Update the candidates of these sequences and copy the tokens that follow them, up to the
    first of `stops` (int32), where a response or its turn would end.

    Sequence i has row i of `texts`. Source 0 is the live index, 1 the history. Each pass goes over
    all sequences and prefetches what the next pass reads, so that memory latency is paid once
    instead of once per sequence."""
    # The counters are read once, so that a block is valid during all passes or in none.
    live_text, history_text = _text(live), _text(history)
    _prefetch_blocks(live_text, 0, candidates, handles, most)
    _prefetch_blocks(history_text, 1, candidates, handles, most)
    _advance(live_text, 0, contexts, candidates, handles, most)
    _advance(history_text, 1, contexts, candidates, handles, most)
    count = _keep(contexts, candidates, handles, most, work)
    _hash_all(live, history, contexts, handles, work, count)
    for level in range(NUM_LEVELS):
        walking = _begin_chains(
            live, live_text, level, INDEXES, contexts, candidates, handles, work, count
        )
        _follow_chains(live, live_text, 0, level, contexts, candidates, handles, work, walking)
        walking = _begin_chains(
            history, history_text, level, 1, contexts, candidates, handles, work, count
        )
        _follow_chains(
            history, history_text, 1, level, contexts, candidates, handles, work, walking
        )
    for j in range(count):
        handle = handles[work.rows[j]]
        candidates.needed[handle] = min(KEPT, max(candidates.found[handle], 1))
    texts.counts[: handles.shape[0]] = 0
    _copy(live_text, 0, candidates, handles, most, stops, texts)
    _copy(history_text, 1, candidates, handles, most, stops, texts)


@inner
def _prefetch_blocks(text, source, candidates, handles, most):
    """Prefetch the blocks of the candidates; drop candidates whose block is not valid any more."""
    for i in range(handles.shape[0]):
        at, sources = candidates.at[handles[i]], candidates.sources[handles[i]]
        for slot in range(PLACES):
            if at[slot] != 0 and sources[slot] == source and most[i] > 0:
                if _is_there(text, at[slot] // BLOCK_WORDS):
                    prefetch(text.words, _start(text, at[slot] // BLOCK_WORDS))
                    prefetch(text.words, _place(text, at[slot]) + 1)
                else:
                    at[slot] = 0


@inner
def _advance(text, source, contexts, candidates, handles, most):
    """Move candidates past the new tokens; drop those found by suffix that predicted others."""
    for i in range(handles.shape[0]):
        handle = handles[i]
        at, sources = candidates.at[handle], candidates.sources[handle]
        recent = contexts.recent[handle]
        num_new = contexts.length[handle] - candidates.seen[handle]
        if most[i] == 0:
            continue
        for slot in range(candidates.found[handle]):
            if at[slot] != 0 and sources[slot] == source and num_new > 0:
                is_far = num_new > LONGEST_MATCH
                at[slot] = np.int64(0) if is_far else _followed(text, at[slot], recent, num_new)
        for slot in range(FOUND, PLACES):
            if at[slot] != 0 and sources[slot] == source:
                at[slot] = _moved(text, at[slot], num_new) if num_new > 0 else at[slot]
                if at[slot] != 0:
                    longest = min(LONGEST_MATCH, contexts.known[handle])
                    candidates.matched[handle, slot] = _agreement(text, at[slot], recent, longest)


@inner
def _keep(contexts, candidates, handles, most, work):
    """Close the gaps of dropped candidates. Sequences with too few left are cleared for a new
    search and written to `work.rows`; return their number."""
    count = 0
    for i in range(handles.shape[0]):
        handle = handles[i]
        if most[i] == 0:
            continue
        at, matched = candidates.at[handle], candidates.matched[handle]
        num_new = contexts.length[handle] - candidates.seen[handle]
        kept = 0
        for slot in range(candidates.found[handle]):
            if at[slot] != 0:
                at[kept] = at[slot]
                matched[kept] = min(matched[slot] + num_new, LONGEST_MATCH)
                candidates.sources[handle, kept] = candidates.sources[handle, slot]
                candidates.kinds[handle, kept] = candidates.kinds[handle, slot]
                candidates.merits[handle, kept] = candidates.merits[handle, slot]
                kept += 1
        candidates.seen[handle] = contexts.length[handle]
        candidates.age[handle] += num_new
        if kept < candidates.needed[handle] or candidates.age[handle] >= STALE_AFTER:
            work.rows[count] = i
            count += 1
            kept = 0
            candidates.age[handle] = 0
        candidates.found[handle] = kept
        at[kept:FOUND] = 0
    return count


@inner
def _hash_all(live, history, contexts, handles, work, count):
    """Compute the keys of the sequences to search for, and prefetch the heads of their chains."""
    for j in range(count):
        keys = work.keys[j]
        _hash(contexts, handles[work.rows[j]], keys)
        for level in range(NUM_LEVELS):
            for heads in (live.heads, history.heads):
                prefetch(heads, level * heads.shape[1] + _bucket(keys[level], heads))


@inlined
def _hash(contexts, handle, keys):
    """Compute the keys of the sequence's suffixes, by level."""
    state = np.uint64(0)
    for length in range(1, min(LONGEST_LEVEL, contexts.known[handle]) + 1):
        state = _mixed(state ^ np.uint64(contexts.recent[handle, MEMORY - length] + 1))
        for level in range(NUM_LEVELS):
            if LEVELS[level] == length:
                keys[level] = _key(state, contexts.prompt[handle], contexts.itself[handle], level)


@inner
def _begin_chains(arrays, text, level, parts, contexts, candidates, handles, work, count):
    """Choose the sequences whose chain is followed, and its first position; return their number.
    The free places of a sequence are shared by the `parts` indexes still to come at this level."""
    walking = 0
    for j in range(count):
        i = work.rows[j]
        found = candidates.found[handles[i]]
        if parts == INDEXES:
            is_tried = found < ENOUGH and LEVELS[level] <= contexts.known[handles[i]]
            work.limits[i] = FOUND if is_tried else 0
        if found < work.limits[i]:
            low = arrays.heads[level, _bucket(work.keys[j, level], arrays.heads)]
            position = _restored(text, low)
            if position != 0:
                _prefetch_position(arrays, text, level, position)
                work.sequence[walking], work.at[walking] = i, position
                work.most[i] = found + (FOUND - found + parts - 1) // parts
                walking += 1
    return walking


@inlined
def _prefetch_position(arrays, text, level, position):
    """Prefetch all that is read for a position in a chain."""
    place = _place(text, position)
    prefetch(arrays.links, level * text.words.shape[0] + place)
    prefetch(text.words, place)
    prefetch(text.words, place - position % BLOCK_WORDS)


@inner
def _follow_chains(arrays, text, source, level, contexts, candidates, handles, work, walking):
    """Follow all chains, one step of each at a time, and add the positions as candidates."""
    for _ in range(_STEPS):
        going = 0
        for j in range(walking):
            i, position = work.sequence[j], work.at[j]
            handle = handles[i]
            following = _restored(text, arrays.links[level, _place(text, position)])
            _add_candidate(arrays, text, source, level, position, contexts, candidates, handle)
            if following != 0 and candidates.found[handle] < work.most[i]:
                _prefetch_position(arrays, text, level, following)
                work.sequence[going], work.at[going] = i, following
                going += 1
        walking = going


@inlined
def _add_candidate(arrays, text, source, level, position, contexts, candidates, handle):
    """Add a position as a candidate if the suffix ends there, text follows, and it is new."""
    most = min(LONGEST_MATCH, contexts.known[handle])
    matched = _agreement(text, position, contexts.recent[handle], most)
    if matched < LEVELS[level] or _moved(text, position, 1) == 0:
        return
    at, sources = candidates.at[handle], candidates.sources[handle]
    count = candidates.found[handle]
    for other in range(count):
        if at[other] == position and sources[other] == source:
            return
    slot = text.words[_start(text, position // BLOCK_WORDS) + RESPONSE] % arrays.records.shape[0]
    kind = _kind(arrays.records[slot], contexts, handle)
    if kind != KIND_SHARED or SCOPES[level] == OF_ALL:
        at[count] = position
        sources[count] = source
        candidates.matched[handle, count] = matched
        candidates.kinds[handle, count] = kind
        candidates.merits[handle, count] = arrays.merits[slot]
        candidates.found[handle] = count + 1


@inlined
def _kind(record, contexts, handle):
    """Return the origin of a text: another prompt, the prompt, or the sequence itself."""
    if record[OF_PROMPT] != contexts.prompt[handle]:
        return KIND_SHARED
    is_same = record[OF_SAMPLE] == contexts.sample[handle]
    if is_same and record[OF_NOISE] == contexts.noise[handle] and record[FINISHED] == 0:
        return KIND_SELF
    return KIND_OWN


@inner
def _copy(text, source, candidates, handles, most, stops, texts):
    """Copy the tokens that follow the candidates."""
    for i in range(handles.shape[0]):
        handle = handles[i]
        for slot in range(PLACES):
            position = candidates.at[handle, slot]
            if position != 0 and candidates.sources[handle, slot] == source and most[i] > 0:
                out = texts.tokens[i, slot]
                copied = _copy_after(text, position, out, most[i])
                texts.counts[i, slot] = _until_stop(out, copied, stops)
                texts.matched[i, slot] = candidates.matched[handle, slot]
                texts.kinds[i, slot] = candidates.kinds[handle, slot]
                texts.merits[i, slot] = candidates.merits[handle, slot]


@inlined
def _until_stop(tokens, count, stops):
    """Return how many of the first `count` tokens there are up to the first that is in `stops`."""
    for place in range(count):
        for i in range(stops.shape[0]):
            if tokens[place] == stops[i]:
                return place + 1
    return count


@inner
def remember(contexts, handles, tokens, offsets):
    """Append tokens[offsets[i]:offsets[i + 1]] to the recent tokens of handles[i], for all i."""
    for i in range(handles.shape[0]):
        handle, num_new = handles[i], offsets[i + 1] - offsets[i]
        recent = contexts.recent[handle]
        kept = max(MEMORY - num_new, 0)
        for j in range(kept):
            recent[j] = recent[j + MEMORY - kept]
        for j in range(kept, MEMORY):
            recent[j] = tokens[offsets[i + 1] - MEMORY + j]
        contexts.known[handle] = min(contexts.known[handle] + num_new, MEMORY)
        contexts.length[handle] += num_new
