// Means over neighbouring points. Shares of time and rates come with the time that they measure, and
// their mean is weighted by it; without a choice they are smoothed a little.

export const OF_RATES = 5;

// { values, width }: `width` null stands for no choice.
export function smoothed({ value, weight }, width) {
  const chosen = width ?? (weight && value.length > 2 * OF_RATES ? OF_RATES : 1);
  if (chosen < 2) return { values: value, width: 1 };
  const share = 2 / (chosen + 1);
  let sum = null, all = null;
  const values = value.map((each, i) => {
    const w = weight ? weight[i] : 1;
    sum = sum === null ? w * each : sum + share * (w * each - sum);
    all = all === null ? w : all + share * (w - all);
    return sum / all;
  });
  return { values, width: chosen };
}
