// Colours of the style sheet for canvases, which take no variables.

const known = new Map();
window.addEventListener("theme", () => known.clear());

export function colour(name) {
  if (!known.has(name)) {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    known.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return known.get(name);
}

export function faded(name, alpha) {
  const [r, g, b] = colour(name).match(/[\d.]+/g);
  return `rgba(${r}, ${g}, ${b}, ${alpha})`;
}

const LINES = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];

export function line(i) {
  return LINES[i % LINES.length];
}
