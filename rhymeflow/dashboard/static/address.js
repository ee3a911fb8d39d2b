// The address of a view: #/RUN/VIEW/PARTS?NAME=VALUE.

export function read() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [run, view, ...parts] = path.split("/").map(decodeURIComponent);
  return { run, view: view || "run", parts, parameters: new URLSearchParams(query) };
}

// Parameters as a query; a list repeats the name, and empty values are left out.
export function search(parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of [value].flat()) {
      if (each !== null && each !== undefined && each !== "") query.append(name, each);
    }
  }
  return query.toString();
}

export function to(run, view, parts = [], parameters = {}) {
  const path = [run, view, ...parts].map((each) => encodeURIComponent(each)).join("/");
  const text = search(parameters);
  return `#/${path}${text ? `?${text}` : ""}`;
}

// Changes parameters of the shown view, without a new entry in the browser's history.
export function change(parameters) {
  const now = read();
  const all = {};
  for (const name of now.parameters.keys()) all[name] = now.parameters.getAll(name);
  location.replace(to(now.run, now.view, now.parts, { ...all, ...parameters }));
}
