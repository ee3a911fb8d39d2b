// A logarithmic axis, of the values above 0.
export function logRange(min, max) {
  return min === null || max <= 0 ? [0.1, 1] : [min / 1.2, max * 1.2];
}

// The axis of values: a flat curve is in the middle of the plot and not at its frame.

export function range(min, max) {
  if (min === null || max === null) return [0, 1];
  const size = Math.max(Math.abs(min), Math.abs(max));
  if (size === 0) return [-0.2, 1];
  if (size < 1e-6) return [min < 0 ? -1e-6 : -4e-8, 1e-6]; // zero, but for rounding
  if (max - min <= 1e-6 * size) return min > 0 ? [0, 1.4 * max] : [1.4 * min, 0];
  const margin = 0.08 * (max - min);
  const low = min - margin, high = max + margin;
  if (min >= 0 && min < 0.5 * max) return [-0.04 * max, high]; // from 0, if that is near
  return [low, high];
}
