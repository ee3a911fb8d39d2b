// Creates elements without parsing HTML: text of a policy can only become a text node.

const isThere = (each) => each !== null && each !== undefined && each !== false;

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "value") element.value = value;
    else if (name === "checked") element.checked = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(isThere));
  return element;
}

// Replaces the children of an element; null is left out.
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter(isThere));
}

// Sets a variable of the style sheet on an element; a style attribute is forbidden by the page's policy.
export function styled(element, name, value) {
  element.style.setProperty(name, value);
  return element;
}
