// Numbers, times and sizes as text.

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size < 10 ** -digits && size < 0.1 ? exponential(value) : value.toFixed(digits);
}

// With about four digits, as people read a curve.
export function figure(value) {
  const size = Math.abs(value ?? 0);
  return number(value, size >= 100 ? 0 : size >= 10 ? 1 : 3);
}

export function signed(value) {
  return `${value > 0 ? "+" : ""}${number(value)}`;
}

// For an axis, with few characters.
export function short(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return `${Number((value / unit).toPrecision(3))}${letter}`;
  }
  return value === 0 || size >= 0.001 ? String(Number(value.toPrecision(3))) : exponential(value);
}

function exponential(value) {
  return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.round(seconds);
  const [hours, ...rest] = [Math.floor(s / 3600), Math.floor(s / 60) % 60, s % 60];
  const text = rest.map((each) => String(each).padStart(2, "0")).join(":");
  return hours ? `${hours}:${text}` : text;
}

export function bytes(count) {
  return count < 1000 ? `${count} bytes` : `${short(count)}B`;
}

export function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

export function plural(count, what) {
  return `${number(count)} ${what}${count === 1 ? "" : "s"}`;
}
