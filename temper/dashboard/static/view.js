// What the reader has chosen, kept in the address so that a copied link shows the same. Owns: addresses (#/RUN/page?…).

/** Choices that stay when the reader goes to another page or run. */
const SHARED = ["compare", "seeds", "kind", "x", "smooth", "scale"];
export const TABLE = "runs"; // in the place of a run: the table of all; ids are hexadecimal, so none is called that

/** {id, name, parameters} of the address. */
export function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [id, name] = path.split("/");
  const isTable = id === TABLE && !name;
  return {
    id: isTable ? "" : decodeURIComponent(id || ""),
    name: isTable ? TABLE : name || "overview",
    parameters: new URLSearchParams(query),
  };
}

export function address(id, name, parameters = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters))
    if (value !== "" && value !== null && value !== undefined) query.set(key, value);
  const path = name === TABLE ? TABLE : `${encodeURIComponent(id)}/${name}`;
  return `#/${path}${query.size ? `?${query}` : ""}`;
}

/** What a link to another page takes along. */
export function carried(parameters) {
  return Object.fromEntries(SHARED.map((name) => [name, parameters.get(name) || ""]));
}

/** The choices of the page that is shown. */
export class View {
  constructor({ id, name, parameters }, changed = () => {}) {
    Object.assign(this, { id, name, changed });
    this.parameters = new URLSearchParams(parameters);
  }

  get(name, fallback = "") {
    return this.parameters.get(name) ?? fallback;
  }

  list(name) {
    return this.get(name).split(",").filter(Boolean);
  }

  /** Changes some choices, in the address too; empty ones leave it. */
  set(changes) {
    for (const [name, value] of Object.entries(changes)) {
      const text = Array.isArray(value) ? value.join(",") : String(value ?? "");
      if (text) this.parameters.set(name, text);
      else this.parameters.delete(name);
    }
    this.write();
    this.changed();
  }

  /** Some browsers allow a hundred addresses in half a minute, which a slider can exceed: then a little later. */
  write() {
    clearTimeout(this.later);
    try {
      history.replaceState(null, "", address(this.id, this.name, Object.fromEntries(this.parameters)));
    } catch {
      this.later = setTimeout(() => this.isCurrent() && this.write(), 1000);
    }
  }

  /** Whether the address is still that of this page. */
  isCurrent() {
    const { id, name } = route();
    return id === this.id && name === this.name;
  }

  toggle(name, value) {
    const held = this.list(name);
    this.set({ [name]: held.includes(value) ? held.filter((one) => one !== value) : [...held, value] });
  }
}
