// Light or dark: what the system says, unless the reader chose otherwise. Canvases listen to "theme".

const KEY = "rhymeflow-theme";
const NAMES = { system: "◐ Auto", light: "☀ Light", dark: "☾ Dark" };
const order = Object.keys(NAMES);

function chosen() {
  const found = localStorage.getItem(KEY);
  return found in NAMES ? found : "system";
}

function apply(button) {
  document.documentElement.dataset.theme = chosen();
  button.textContent = NAMES[chosen()];
  button.title = "Light or dark";
  button.setAttribute("aria-label", `Theme: ${chosen()}`);
  window.dispatchEvent(new Event("theme"));
}

export function begin(button) {
  apply(button);
  button.addEventListener("click", () => {
    localStorage.setItem(KEY, order[(order.indexOf(chosen()) + 1) % order.length]);
    apply(button);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(button));
}
