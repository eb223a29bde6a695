// Follows a run while it is written. Owns: the event stream and how often the page hears of it.

const PAUSE_MS = 1500;
const KINDS = ["step", "evaluation", "alarm", "state"];

/** Calls changed(kinds) at most every PAUSE_MS, and state(name, text): how the run stands, or "lost". Returns a function
 * that ends it.
 *
 * Only a page that is looked at listens: a browser opens six connections to a server, over all its tabs, and six quiet
 * streams would leave none for the pages themselves. */
export function follow(run, changed, state) {
  let source = null;
  let timer = null;
  let waiting = new Set();
  let known = `${run.last_stage}/${run.last_step}`; // a stream begins with where the run is, which the page shows already
  let begun = run.state;
  const tell = () => {
    timer = null;
    const kinds = waiting;
    waiting = new Set();
    changed(kinds);
  };
  const heard = (kind, data) => {
    const { stage, step, state: name, text } = JSON.parse(data || "{}");
    if (kind === "step" && known === `${stage}/${step}`) return;
    if (kind === "step") known = `${stage}/${step}`;
    if (kind === "state") {
      state(name, text);
      if (name === "finished") end();
      if (name === begun) return;
      begun = name;
    }
    waiting.add(kind);
    timer ??= setTimeout(tell, PAUSE_MS);
  };
  const open = () => {
    if (source) return;
    source = new EventSource(`/api/stream?run=${encodeURIComponent(run.id)}`);
    for (const kind of KINDS) source.addEventListener(kind, (event) => heard(kind, event.data));
    source.addEventListener("error", () => state("lost"));
  };
  const close = () => {
    source?.close();
    source = null;
  };
  const look = () => {
    if (document.hidden) {
      close();
      return;
    }
    open();
    for (const kind of ["evaluation", "alarm"]) waiting.add(kind); // whatever happened while nobody looked
    timer ??= setTimeout(tell, PAUSE_MS);
  };
  const listeners = [
    [document, "visibilitychange", look],
    [window, "pagehide", close],
    [window, "pageshow", open],
  ];
  for (const [target, name, listener] of listeners) target.addEventListener(name, listener);
  const end = () => {
    close();
    for (const [target, name, listener] of listeners) target.removeEventListener(name, listener);
  };
  if (!document.hidden) open();
  return () => {
    end();
    clearTimeout(timer);
  };
}
