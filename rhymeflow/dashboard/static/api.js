// Requests to the server. A response that comes after a newer request of the same view is dropped.

import { search } from "./address.js";

let current = new AbortController();

export function leave() {
  current.abort();
  current = new AbortController();
}

export async function ask(path, parameters = {}) {
  const text = search(parameters);
  const response = await fetch(`/api/${path}${text ? `?${text}` : ""}`, { signal: current.signal });
  if (!response.headers.get("content-type")?.startsWith("application/json")) {
    throw new Error(await response.text());
  }
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}
