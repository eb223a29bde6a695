// Asks the server. Owns: addresses, errors in words, what was asked a moment ago. Refuses: changing a run; notes alone
// are sent.

const DEADLINE_MS = 30000;
const kept = new Map();

export async function ask(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  return exchange(query.size ? `${path}?${query}` : path, path);
}

/** What people write beside a run. */
export function send(path, content) {
  return exchange(path, path, {
    method: "PUT",
    body: JSON.stringify(content),
    headers: { "Content-Type": "application/json", Accept: "application/json" },
  });
}

async function exchange(address, path, options = { headers: { Accept: "application/json" } }) {
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), DEADLINE_MS);
  try {
    const answer = await fetch(address, { signal: stop.signal, ...options });
    const body = await answer.json().catch(() => null);
    if (!answer.ok)
      throw new Error(
        (body && (body.error || (body.detail && JSON.stringify(body.detail)))) ||
          `The server answered ${answer.status} to ${path}.`,
      );
    if (body === null) throw new Error(`The server's answer to ${path} is not JSON.`);
    return body;
  } catch (error) {
    if (error.name === "AbortError")
      throw new Error(`The server did not answer ${path} within ${DEADLINE_MS / 1000} s.`);
    if (error instanceof TypeError) throw new Error("The server cannot be reached. Is `temper watch` still running?");
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

/** Something of one run. */
export function ofRun(id, what, parameters) {
  return ask(`/api/runs/${encodeURIComponent(id)}/${what}`, parameters);
}

/** The same, remembered until the run moves on: going back to a page shows it at once. */
export function remembered(id, what) {
  const key = `${id}/${what}`;
  if (!kept.has(key)) {
    const answer = ofRun(id, what);
    kept.set(key, answer);
    answer.catch(() => kept.delete(key));
  }
  return kept.get(key);
}

export function forget(id) {
  for (const key of [...kept.keys()]) if (key.startsWith(`${id}/`)) kept.delete(key);
}
