// What nagara tells: one stream of server-sent events, kept as plain data.
//
// Not EventSource: that cannot send the token in a header.

const TOKEN = "nagara-token";
const MAX_STARTS = 2000;
const MAX_SAMPLES = 300;

export const world = { apps: new Map(), starts: [], pool: null, samples: [], is_live: false };
const listeners = new Set();
let stop = null;

export function token() { return sessionStorage.getItem(TOKEN); }
export function keep(text) {
  if (text) sessionStorage.setItem(TOKEN, text);
  else sessionStorage.removeItem(TOKEN);
}

/** Calls `listener` after every change; returns how to end that. */
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function told(what) { for (const listener of [...listeners]) listener(what); }

/** Raised when the token is refused. */
export class Refused extends Error {}

export async function ask(path, options = {}) {
  const headers = { Authorization: `Bearer ${token()}` };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.status === 401) throw new Refused("the token is refused");
  if (!answer.ok) {
    let message = `${answer.status}`;
    try { message = (await answer.json()).error.message; } catch { /* no JSON: the number */ }
    throw new Error(message);
  }
  return answer;
}

export async function document_(path) { return (await ask(path)).json(); }

/** Follows nagara until `leave`; comes back by itself after a break. */
export async function follow(refused) {
  leave();
  const abort = new AbortController();
  stop = () => abort.abort();
  let pause_ms = 500;
  while (!abort.signal.aborted) {
    try {
      const answer = await ask("/api/events", { signal: abort.signal });
      for await (const event of events(answer.body)) {
        pause_ms = 500;
        take(event.name, event.data);
      }
    } catch (error) {
      if (abort.signal.aborted) return;
      if (error instanceof Refused) { refused(); return; }
    }
    if (abort.signal.aborted) return;
    world.is_live = false;
    told("link");
    await new Promise((done) => setTimeout(done, pause_ms));
    pause_ms = Math.min(8000, pause_ms * 2);
  }
}

export function leave() {
  stop?.();
  stop = null;
  Object.assign(world, { apps: new Map(), starts: [], pool: null, samples: [], is_live: false });
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const name = lines.find((line) => line.startsWith("event: "))?.slice(7);
      const data = lines.find((line) => line.startsWith("data: "))?.slice(6);
      if (name && data) yield { name, data: JSON.parse(data) };
    }
  }
}

function take(name, data) {
  if (name === "hello") {
    world.apps = new Map(data.apps.map((app) => [app.name, app]));
    world.starts = data.starts;
    world.pool = data.pool;
    world.samples = data.samples;
    world.is_live = true;
    told("link");
  } else if (name === "apps") {
    for (const app of data.changed) world.apps.set(app.name, app);
    for (const app of data.gone) {
      world.apps.delete(app);
      world.starts = world.starts.filter((start) => start.app !== app);
    }
  } else if (name === "starts") {
    addStarts([...data].reverse(), true);
  } else if (name === "pool") {
    world.pool = data;
  } else if (name === "sample") {
    world.samples = [...world.samples, data].slice(-MAX_SAMPLES);
  }
  told(name);
}

/** Adds starts at the new or at the old end; a replica is there once. */
export function addStarts(starts, newest) {
  const known = new Set(world.starts.map((start) => start.replica));
  const fresh = starts.filter((start) => !known.has(start.replica));
  world.starts = newest
    ? [...fresh, ...world.starts].slice(0, Math.max(MAX_STARTS, world.starts.length))
    : [...world.starts, ...fresh];
  return fresh.length;
}
