// The tokens of a response as the server knows them.

export function tokensOf(found) {
  const versions = [...new Set(found.segments.map((each) => each.version))].sort((a, b) => a - b);
  const tokens = [];
  for (const segment of found.segments) {
    for (let i = 0; i < segment.length; i += 1) {
      const at = segment.start + i, isSampled = !segment.observed;
      tokens.push({
        at, segment, observed: segment.observed, begins: i === 0,
        id: found.tokens?.[at] ?? null,
        text: found.texts?.[at] ?? (found.tokens ? `⟨${found.tokens[at]}⟩` : "·"),
        logprob: isSampled ? found.logprobs?.[at] ?? null : null,
        learner: isSampled ? found.learner_logprobs?.[at] ?? null : null,
        accepted: isSampled ? found.accepted?.[at] ?? null : null,
        flags: found.flags?.[at] ?? null,
        versionIndex: versions.indexOf(segment.version),
      });
    }
  }
  return { tokens, versions: versions.length };
}

// Positions of `tokens` that are not in the longest common subsequence with `others`. Equal beginnings
// and ends are removed before; if more than two thousand are left, all from the first difference on.
export function different(tokens, others) {
  let begin = 0;
  while (begin < tokens.length && begin < others.length && tokens[begin] === others[begin]) begin += 1;
  let end = 0;
  while (end < tokens.length - begin && end < others.length - begin
    && tokens[tokens.length - 1 - end] === others[others.length - 1 - end]) end += 1;
  const a = tokens.slice(begin, tokens.length - end), b = others.slice(begin, others.length - end);
  const found = new Set();
  if (a.length > 2000 || b.length > 2000) {
    a.forEach((_, i) => found.add(begin + i));
    return found;
  }
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] = a[i] === b[j] ? lengths[(i + 1) * width + j + 1] + 1
        : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  for (let i = 0, j = 0; i < a.length;) {
    if (j < b.length && a[i] === b[j]) { i += 1; j += 1; }
    else if (j < b.length && lengths[i * width + j + 1] >= lengths[(i + 1) * width + j]) j += 1;
    else { found.add(begin + i); i += 1; }
  }
  return found;
}
