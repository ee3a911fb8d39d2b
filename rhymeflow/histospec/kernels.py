"""The compiled code of the index: how text is stored, chained and found again.

Text lies in blocks of 32 words: six words about the block, then 26 tokens. A response's blocks
point at each other, so responses that grow at the same time do not disturb one another. Blocks are
numbered as they are allocated, from 1; block n lies in place n modulo the number of places, so new
text overwrites the oldest. A *position* is (number of the block) * 32 + (word in it) and is never
used twice.

For each level, `heads` holds the newest position at which a given suffix of tokens ends (by hash,
together with the prompt where only its own text counts), and `links` the position before it in its
chain. Tables hold positions modulo 2**32.

Holds true, whatever a writer in another process does meanwhile:
- readers follow a block's number, never a place: a block that was overwritten is not what it was;
- every walk ends: a chain is followed for so many links, and from block to block numbers rise or
  fall strictly;
- what is read from shared memory is a position only after it was compared with the counters.

All compiled code that knows the layout stands in this file because numba's cache notices a change
in the file of a function only, not in those of the functions it calls.
"""

from __future__ import annotations

import numpy as np
from numba import njit

BLOCK_WORDS = 32
NUMBER, RESPONSE, PREVIOUS, NEXT, COUNT = 0, 1, 2, 3, 4
FIRST_WORD = 6
BLOCK_TOKENS = BLOCK_WORDS - FIRST_WORD

# Words of the header.
NEXT_BLOCK, FIRST_BLOCK, NEXT_RESPONSE, FIRST_RESPONSE, NUM_TOKENS = 0, 1, 2, 3, 4

# Words of a record: what is known of a response. LENGTH counts the prompt's tail, TAIL tokens.
RECORD_WORDS = 12
(OF_RESPONSE, OF_PROMPT, OF_SAMPLE, OF_NOISE, OF_VERSION, LENGTH) = 0, 1, 2, 3, 4, 5
(TAIL, FIRST, LAST, EARLIER, FINISHED) = 6, 7, 8, 9, 10

# Suffix lengths in the order in which they are tried, and whose text is chained together: that of
# all prompts, of one prompt, or of one response and those with its prompt, sample and noise.
OF_ALL, OF_THE_PROMPT, OF_ITSELF = 0, 1, 2
LEVELS = (6, 4, 2, 1, 1)
SCOPES = (OF_THE_PROMPT, OF_ALL, OF_THE_PROMPT, OF_ITSELF, OF_ALL)
NUM_LEVELS = 5
LONGEST_LEVEL = 6

MEMORY = 64  # tokens remembered of each sequence
LONGEST_MATCH = 32
FOUND = 12  # most candidates found by suffix in one index
ALIGNED = 2  # most candidates by position in one index
PLACES = FOUND + ALIGNED
ENOUGH = 8  # candidates with which shorter suffixes are not tried
KEPT = 2  # candidates with which none are searched anew
STALE_AFTER = 32  # tokens after which candidates are searched anew

KIND_SHARED, KIND_OWN, KIND_SELF, KIND_ALIGNED = 0, 1, 2, 3

_LOW = 0xFFFFFFFF
_BUCKET_WALK = 256  # responses looked at for one prompt
_SIBLINGS = 64  # responses whose rewards are compared
_STEPS = 12  # links followed in one chain

kernel = njit(cache=True, nogil=True, error_model="numpy")
# Counting references to every array that is passed takes more time than what is done with it.
# What makes no array needs no count.
inner = njit(cache=True, nogil=True, error_model="numpy", _nrt=False)


@inner
def _base(arrays, number):
    return (number % (arrays.words.shape[0] // BLOCK_WORDS)) * BLOCK_WORDS


@inner
def _mixed(value):
    value = (value ^ (value >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    return value ^ (value >> np.uint64(29))


@inner
def _bucket(state, prompt, itself, level, num_heads):
    """Where the chain of a suffix begins; `state` is the hash of its tokens."""
    value = state + np.uint64(level + 1) * np.uint64(0xD6E8FEB86659FD93)
    if SCOPES[level] == OF_THE_PROMPT:
        value ^= np.uint64(prompt)
    elif SCOPES[level] == OF_ITSELF:
        value ^= np.uint64(itself)
    return np.int64(_mixed(value) & np.uint64(num_heads - 1))


@inner
def _itself(prompt, sample, noise_epoch):
    """What stands for a response and those that share its prompt, sample and noise."""
    value = _mixed(np.uint64(prompt) + _mixed(np.uint64(sample + 1)))
    return _mixed(value + np.uint64(noise_epoch + 2))


# ---- writing


@inner
def begin(arrays, prompt, tail_length, sample, noise_epoch, version):
    """Enter a response, of which the first `tail_length` tokens are its prompt's last ones."""
    header, records = arrays.header, arrays.records
    response = header[NEXT_RESPONSE]
    slot = response % records.shape[0]
    bucket = prompt % arrays.prompts.shape[0]
    records[slot, OF_RESPONSE] = 0
    records[slot, OF_PROMPT] = prompt
    records[slot, OF_SAMPLE] = sample
    records[slot, OF_NOISE] = noise_epoch
    records[slot, OF_VERSION] = version
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


@inner
def append_many(arrays, responses, tokens, offsets):
    """Append tokens[offsets[i]:offsets[i + 1]] to response i, for all i."""
    for i in range(responses.shape[0]):
        _append(arrays, responses[i], tokens, offsets[i], offsets[i + 1])


@inner
def _append(arrays, response, tokens, start, stop):
    words, records = arrays.words, arrays.records
    slot = response % records.shape[0]
    if response < arrays.header[FIRST_RESPONSE] or records[slot, OF_RESPONSE] != response:
        return
    number = records[slot, LAST]
    base = _base(arrays, number)
    if number != 0 and words[base + NUMBER] != number:
        return  # overwritten
    prompt = records[slot, OF_PROMPT]
    itself = _itself(prompt, records[slot, OF_SAMPLE], records[slot, OF_NOISE])
    for i in range(start, stop):
        if number == 0 or words[base + COUNT] == BLOCK_TOKENS:
            number = _allocate(arrays, response, number)
            base = _base(arrays, number)
            records[slot, LAST] = number
            if records[slot, FIRST] == 0:
                records[slot, FIRST] = number
        count = words[base + COUNT]
        words[base + FIRST_WORD + count] = tokens[i]
        words[base + COUNT] = count + 1
        records[slot, LENGTH] += 1
        arrays.header[NUM_TOKENS] += 1
        # What stands in a prompt is a guess for its own responses only.
        is_prompt = records[slot, LENGTH] < records[slot, TAIL]
        _chain(arrays, prompt, itself, number, base, FIRST_WORD + count, is_prompt)


@inner
def _allocate(arrays, response, previous):
    """Take the oldest block for the continuation of `previous` (0: of nothing)."""
    header, words = arrays.header, arrays.words
    number = header[NEXT_BLOCK]
    base = _base(arrays, number)
    if words[base + NUMBER] >= header[FIRST_BLOCK]:
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


@inner
def _chain(arrays, prompt, itself, number, base, word, is_prompt):
    """Put the token at `word` of this block at the front of its chains."""
    words, heads, links = arrays.words, arrays.heads, arrays.links
    first = arrays.header[FIRST_BLOCK]
    here = base + word
    position = np.uint32((number * BLOCK_WORDS + word) & _LOW)
    state = np.uint64(0)
    for length in range(1, LONGEST_LEVEL + 1):
        state = _mixed(state ^ np.uint64(words[base + word] + 1))
        for level in range(NUM_LEVELS):
            if LEVELS[level] == length and (SCOPES[level] != OF_ALL or not is_prompt):
                bucket = _bucket(state, prompt, itself, level, heads.shape[1])
                links[level, here] = heads[level, bucket]
                heads[level, bucket] = position
        word -= 1
        if word < FIRST_WORD:
            previous = np.int64(words[base + PREVIOUS])
            base = _base(arrays, previous)
            if previous < first or words[base + NUMBER] != previous:
                return
            word = BLOCK_WORDS - 1


@kernel
def finish(arrays, response, reward):
    """Close a response; weigh the prompt's responses by how their rewards compare."""
    records, rewards = arrays.records, arrays.rewards
    slot = response % records.shape[0]
    if response < arrays.header[FIRST_RESPONSE] or records[slot, OF_RESPONSE] != response:
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
        if at < arrays.header[FIRST_RESPONSE] or records[place, OF_RESPONSE] != at:
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


@inner
def _holds(arrays, position):
    """Whether a token lies at this position, and still the one that was put there."""
    number, word = position // BLOCK_WORDS, position % BLOCK_WORDS
    if number < arrays.header[FIRST_BLOCK] or number >= arrays.header[NEXT_BLOCK]:
        return False
    base = _base(arrays, number)
    if arrays.words[base + NUMBER] != number or word < FIRST_WORD:
        return False
    return word - FIRST_WORD < arrays.words[base + COUNT]


@inner
def _restored(arrays, low):
    """The position of which a table holds the low 32 bits; 0: none."""
    end = arrays.header[NEXT_BLOCK] * BLOCK_WORDS
    return end - ((end - np.int64(low)) & _LOW) if low != 0 else np.int64(0)


@inner
def _copy_after(arrays, position, out, most):
    """Copy at most so many of the tokens after a position that holds one; return their number."""
    words = arrays.words
    most = min(most, out.shape[0])
    number, word = position // BLOCK_WORDS, position % BLOCK_WORDS + 1
    base = _base(arrays, number)
    copied = 0
    while True:
        stop = min(FIRST_WORD + np.int64(words[base + COUNT]), BLOCK_WORDS, word + most - copied)
        for place in range(base + word, base + stop):
            out[copied] = words[place]
            copied += 1
        following = np.int64(words[base + NEXT])
        is_end = copied == most or stop < BLOCK_WORDS
        if is_end or following <= number or following >= arrays.header[NEXT_BLOCK]:
            return copied
        number, word, base = following, FIRST_WORD, _base(arrays, following)
        if words[base + NUMBER] != number:
            return copied


@inner
def _moved(arrays, position, steps):
    """The position so many tokens after one that holds a token; 0: the text ends before."""
    words = arrays.words
    number, word = position // BLOCK_WORDS, position % BLOCK_WORDS
    base = _base(arrays, number)
    while word + steps >= BLOCK_WORDS:
        steps -= BLOCK_WORDS - word
        following = np.int64(words[base + NEXT])
        if following <= number or following >= arrays.header[NEXT_BLOCK]:
            return np.int64(0)
        number, word, base = following, FIRST_WORD, _base(arrays, following)
        if words[base + NUMBER] != number:
            return np.int64(0)
    if word + steps - FIRST_WORD >= words[base + COUNT]:
        return np.int64(0)
    return number * BLOCK_WORDS + word + steps


@inner
def _agreement(arrays, position, recent, most):
    """How many tokens up to a position that holds one equal the end of `recent`."""
    words, first = arrays.words, arrays.header[FIRST_BLOCK]
    number, word = position // BLOCK_WORDS, position % BLOCK_WORDS
    base = _base(arrays, number)
    matched = 0
    while matched < most:
        if words[base + word] != recent[MEMORY - 1 - matched]:
            break
        matched += 1
        word -= 1
        if word < FIRST_WORD:
            previous = np.int64(words[base + PREVIOUS])
            if previous < first or previous >= number:
                break
            number, word, base = previous, BLOCK_WORDS - 1, _base(arrays, previous)
            if words[base + NUMBER] != number:
                break
    return matched


@inner
def align(arrays, prompt, sample, noise_epoch, length, at):
    """Fill `at` with the newest finished responses that share prompt, sample and noise.

    What is entered is the position of the token before token number `length` of the response.
    """
    records = arrays.records
    count = 0
    response = arrays.prompts[prompt % arrays.prompts.shape[0]]
    at[:] = 0
    for _ in range(_BUCKET_WALK):
        slot = response % records.shape[0]
        if response < arrays.header[FIRST_RESPONSE] or records[slot, OF_RESPONSE] != response:
            return
        is_same = records[slot, OF_PROMPT] == prompt and records[slot, OF_SAMPLE] == sample
        if is_same and records[slot, OF_NOISE] == noise_epoch and records[slot, FINISHED] == 1:
            start = records[slot, FIRST] * BLOCK_WORDS + FIRST_WORD
            before = records[slot, TAIL] + length - 1
            position = _moved(arrays, start, before) if _holds(arrays, start) else np.int64(0)
            if position != 0 and count < at.shape[0]:
                at[count] = position
                count += 1
        earlier = records[slot, EARLIER]
        if earlier >= response:
            return
        response = earlier


@kernel
def collect(arrays, contexts, candidates, handles, most, texts, offset):
    """Bring the candidates of these sequences up to date and copy out what follows them.

    What this index has for sequence i comes into texts[i, offset : offset + PLACES]. Each pass goes
    over all sequences: memory is waited for once, not once for each of them.
    """
    n = handles.shape[0]
    _look_up(arrays, candidates, handles, most)
    searched, which = np.empty(n, np.int64), np.empty(n, np.int64)
    states = np.empty((n, LONGEST_LEVEL + 1), np.uint64)
    chains = np.empty((_STEPS, n), np.int64)
    count = _advance_all(arrays, contexts, candidates, handles, most, searched)
    _search(arrays, contexts, candidates, searched, count, states, chains, which)
    _copy_all(arrays, candidates, handles, most, texts, offset)


@inner
def _advance_all(arrays, contexts, candidates, handles, most, searched):
    """Advance all; enter those that have to be searched, and return how many they are."""
    count = 0
    for i in range(handles.shape[0]):
        if most[i] > 0:
            _advance(arrays, contexts, candidates, handles[i])
            if candidates.found[handles[i]] < candidates.needed[handles[i]]:
                searched[count] = handles[i]
                count += 1
    return count


@inner
def _copy_all(arrays, candidates, handles, most, texts, offset):
    """Copy out what follows the candidates."""
    for i in range(handles.shape[0]):
        handle = handles[i]
        for place in range(PLACES):
            texts.counts[i, offset + place] = 0
            position = candidates.at[handle, place]
            if position != 0 and most[i] > 0:
                texts.counts[i, offset + place] = _copy_after(
                    arrays, position, texts.tokens[i, offset + place], most[i]
                )
                texts.matched[i, offset + place] = candidates.matched[handle, place]
                texts.kinds[i, offset + place] = candidates.kinds[handle, place]
                texts.merits[i, offset + place] = candidates.merits[handle, place]


@inner
def _look_up(arrays, candidates, handles, most):
    """Drop candidates whose text was overwritten."""
    for i in range(handles.shape[0]):
        at = candidates.at[handles[i]]
        for place in range(PLACES):
            if at[place] != 0 and most[i] > 0 and not _holds(arrays, at[place]):
                at[place] = 0


@inner
def _advance(arrays, contexts, candidates, handle):
    """Move candidates past the tokens that came; those that said otherwise are dropped."""
    at, matched = candidates.at[handle], candidates.matched[handle]
    recent = contexts.recent[handle]
    came = contexts.length[handle] - candidates.seen[handle]
    candidates.seen[handle] = contexts.length[handle]
    kept = 0
    for place in range(candidates.found[handle]):
        position = at[place]
        at[place] = 0
        if position == 0 or came > LONGEST_MATCH:
            continue
        position = _followed(arrays, position, recent, came)
        if position != 0:
            at[kept] = position
            matched[kept] = min(matched[place] + came, LONGEST_MATCH)
            candidates.kinds[handle, kept] = candidates.kinds[handle, place]
            candidates.merits[handle, kept] = candidates.merits[handle, place]
            kept += 1
    candidates.found[handle] = kept
    candidates.age[handle] += came
    if candidates.age[handle] >= STALE_AFTER:
        candidates.needed[handle] = FOUND + 1
    for place in range(FOUND, PLACES):
        if at[place] != 0:
            at[place] = _moved(arrays, at[place], came) if came > 0 else at[place]
            if at[place] != 0:
                most = min(LONGEST_MATCH, contexts.known[handle])
                matched[place] = _agreement(arrays, at[place], recent, most)


@inner
def _followed(arrays, position, recent, came):
    """The position `came` tokens on, if they are the last ones of `recent`; otherwise 0."""
    words = arrays.words
    number, word = position // BLOCK_WORDS, position % BLOCK_WORDS
    base = _base(arrays, number)
    for i in range(MEMORY - came, MEMORY):
        word += 1
        if word == BLOCK_WORDS:
            following = np.int64(words[base + NEXT])
            if following <= number or following >= arrays.header[NEXT_BLOCK]:
                return np.int64(0)
            number, word, base = following, FIRST_WORD, _base(arrays, following)
            if words[base + NUMBER] != number:
                return np.int64(0)
        if word - FIRST_WORD >= words[base + COUNT] or words[base + word] != recent[i]:
            return np.int64(0)
    return number * BLOCK_WORDS + word


@inner
def _search(arrays, contexts, candidates, handles, n, states, chains, which):
    """Find anew what stands in the index after the longest suffixes of the first n sequences.

    The last three are memory to work in.
    """
    for i in range(n):
        _hash(contexts, handles[i], states[i])
        candidates.at[handles[i], :FOUND] = 0
        candidates.found[handles[i]] = 0
    for level in range(NUM_LEVELS):
        count = 0
        for i in range(n):
            handle = handles[i]
            known = contexts.known[handle]
            if candidates.found[handle] < ENOUGH and LEVELS[level] <= known:
                which[count] = handle
                prompt = contexts.prompt[handle]
                itself = np.uint64(0)
                if SCOPES[level] == OF_ITSELF:
                    itself = _itself(prompt, contexts.sample[handle], contexts.noise[handle])
                state = states[i, LEVELS[level]]
                chains[0, count] = _bucket(state, prompt, itself, level, arrays.heads.shape[1])
                count += 1
        _climb(arrays, level, chains, count)
        for i in range(count):
            _pick(arrays, contexts, candidates, which[i], level, chains[:, i])
    for i in range(n):
        handle = handles[i]
        candidates.needed[handle] = min(KEPT, max(candidates.found[handle], 1))
        candidates.age[handle] = 0


@inner
def _hash(contexts, handle, states):
    """Fill states[length] with the hash of the sequence's last `length` tokens."""
    state = np.uint64(0)
    for length in range(1, min(LONGEST_LEVEL, contexts.known[handle]) + 1):
        state = _mixed(state ^ np.uint64(contexts.recent[handle, MEMORY - length] + 1))
        states[length] = state


@inner
def _climb(arrays, level, chains, count):
    """Fill chains[:, i] with the newest positions of the chain whose bucket chains[0, i] is.

    All chains by a step at a time, so that the memory of many is on its way at once. After the last
    position that still holds a token comes 0.
    """
    for i in range(count):
        chains[0, i] = _restored(arrays, arrays.heads[level, chains[0, i]])
    for step in range(_STEPS):
        for i in range(count):
            position = chains[step, i]
            link = np.uint32(0)
            if position != 0:
                base = _base(arrays, position // BLOCK_WORDS)
                link = arrays.links[level, base + position % BLOCK_WORDS]
                if not _holds(arrays, position):
                    link = np.uint32(0)
                    chains[step, i] = 0
            if step + 1 < _STEPS:
                chains[step + 1, i] = _restored(arrays, link)


@inner
def _pick(arrays, contexts, candidates, handle, level, chain):
    """Make candidates of a chain's positions."""
    at, count = candidates.at[handle], candidates.found[handle]
    most = min(LONGEST_MATCH, contexts.known[handle])
    for step in range(_STEPS):
        position = chain[step]
        if count == FOUND or position == 0:
            break
        base = _base(arrays, position // BLOCK_WORDS)
        slot = arrays.words[base + RESPONSE] % arrays.records.shape[0]
        kind = _kind(arrays.records[slot], contexts, handle)
        if (kind != KIND_SHARED or SCOPES[level] == OF_ALL) and _moved(arrays, position, 1) != 0:
            matched = _agreement(arrays, position, contexts.recent[handle], most)
            is_new = matched >= LEVELS[level]
            for place in range(count):
                is_new = is_new and at[place] != position
            if is_new:
                at[count] = position
                candidates.matched[handle, count] = matched
                candidates.kinds[handle, count] = kind
                candidates.merits[handle, count] = arrays.merits[slot]
                count += 1
    candidates.found[handle] = count


@inner
def _kind(record, contexts, handle):
    """Whether text is of another prompt, of the prompt, or of the sequence itself."""
    if record[OF_PROMPT] != contexts.prompt[handle]:
        return KIND_SHARED
    is_same = record[OF_SAMPLE] == contexts.sample[handle]
    if is_same and record[OF_NOISE] == contexts.noise[handle] and record[FINISHED] == 0:
        return KIND_SELF
    return KIND_OWN


@inner
def remember(contexts, handles, tokens, offsets):
    """Append tokens[offsets[i]:offsets[i + 1]] to what is remembered of sequence i, for all i."""
    for i in range(handles.shape[0]):
        handle, came = handles[i], offsets[i + 1] - offsets[i]
        recent = contexts.recent[handle]
        kept = max(MEMORY - came, 0)
        for j in range(kept):
            recent[j] = recent[j + MEMORY - kept]
        for j in range(kept, MEMORY):
            recent[j] = tokens[offsets[i + 1] - MEMORY + j]
        contexts.known[handle] = min(contexts.known[handle] + came, MEMORY)
        contexts.length[handle] += came
