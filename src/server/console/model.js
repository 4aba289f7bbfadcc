// What is known: one document, kept up to date by /v1/events, and the last minutes of every policy.

/** Where the listener's paths begin: it may be behind a proxy, under a path of its own. */
const BASE = location.pathname.replace(/console\/?$/, "");
/** Without a message for so long the line is taken to be dead: the server says something every second. */
const SILENCE_MS = 4_000;
/** Between two tries to come back after the server has refused. */
const RETRY_MS = 3_000;
/** A page that is not looked at for so long gives its stream to others. */
const HIDDEN_MS = 30_000;
const FRAMES_MAX = 100;
const EVENTS_MAX = 256;
/** What a region said longer ago is a gap in the charts. */
const OLD_MS = 5_000;

export const model = {
  state: undefined,
  /** `connecting`, `live` or `lost`. */
  line: "connecting",
  /** When the last message came, by this machine's clock. */
  heard: 0,
  why: "",
  events: [],
  /** `{ t, policies: { policy: { region: [admitted, denied] or null } } }`, the oldest first. */
  frames: [],
  step: 3_000,
  /** The admin token, for as long as this page is open; `""` where none is needed. */
  token: undefined,
};

const listeners = new Set();
const eventListeners = new Set();
let source;
let hidden;
let forming;

/** Calls back whenever something has changed. */
export function watch(listener) {
  listeners.add(listener);
}

/** Calls back for every new event. */
export function watchEvents(listener) {
  eventListeners.add(listener);
}

export function changed() {
  for (const listener of listeners) listener();
}

export function start() {
  connect();
  setInterval(check, 1_000);
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hidden);
    if (document.hidden) hidden = setTimeout(disconnect, HIDDEN_MS);
    else if (!source) connect();
  });
}

/** Asks the listener; the answer's body is read, as JSON where it is that. */
export async function api(path, options = {}) {
  const headers = { ...options.headers };
  if (model.token) headers.authorization = `Bearer ${model.token}`;
  const answer = await fetch(BASE + path, { cache: "no-store", ...options, headers });
  const text = await answer.text();
  let json;
  try {
    json = JSON.parse(text);
  } catch {
    json = undefined;
  }
  return { ok: answer.ok, status: answer.status, etag: answer.headers.get("etag"), text, json };
}

/** Why it was refused, in a sentence. */
export function reason(answer) {
  return answer.json?.detail ?? `the daemon answered ${answer.status}`;
}

function connect() {
  disconnect();
  source = new EventSource(`${BASE}v1/events`);
  source.addEventListener("state", (message) => {
    heard(JSON.parse(message.data));
    past();
  });
  source.addEventListener("patch", (message) => {
    if (model.state) heard(merged(model.state, JSON.parse(message.data)));
  });
  source.addEventListener("event", (message) => {
    alive();
    happened([JSON.parse(message.data)], true);
    changed();
  });
  source.onerror = () => {
    // A line that breaks is opened again by the browser itself, an answer that is no stream is not.
    if (source?.readyState !== EventSource.CLOSED) return;
    disconnect();
    setTimeout(() => source || document.hidden || connect(), RETRY_MS);
  };
}

function disconnect() {
  source?.close();
  source = undefined;
}

function check() {
  if (model.heard && Date.now() - model.heard > SILENCE_MS && model.line === "live") model.line = "lost";
  if (!model.heard && performance.now() > SILENCE_MS) model.line = "lost";
  changed();
}

function alive() {
  model.heard = Date.now();
  model.line = "live";
}

function heard(state) {
  alive();
  model.state = state;
  addFrame(state);
  changed();
}

/** What is not in the stream: events so far, and the last minutes. */
async function past() {
  try {
    const { json } = await api("v1/state");
    if (!json) return;
    happened(json.events ?? [], false);
    fillFrames(json);
    changed();
  } catch {
    // The line is down: the next document asks again.
  }
}

function happened(events, fresh) {
  const known = new Set(model.events.map((event) => `${event.id} ${event.at_ms}`));
  const news = events.filter((event) => !known.has(`${event.id} ${event.at_ms}`));
  if (news.length === 0) return;
  model.events = [...model.events, ...news].sort((a, b) => a.at_ms - b.at_ms || a.id - b.id).slice(-EVENTS_MAX);
  if (fresh) for (const event of news) for (const listener of eventListeners) listener(event);
}

/** RFC 7396. */
function merged(target, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const result = target && typeof target === "object" && !Array.isArray(target) ? { ...target } : {};
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete result[key];
    else result[key] = merged(result[key], value);
  }
  return result;
}

function isHeard(region) {
  return region.me || (region.age_ms !== undefined && region.age_ms !== null && region.age_ms < OLD_MS);
}

function addFrame(state) {
  const t = Math.floor(state.now_ms / model.step) * model.step;
  if (!forming || forming.t !== t) {
    forming = { t, n: 0, policies: {} };
    model.frames = [...model.frames.filter((frame) => frame.t < t), forming].slice(-FRAMES_MAX);
  }
  const n = ++forming.n;
  for (const [policy, traffic] of Object.entries(state.traffic ?? {})) {
    const regions = (forming.policies[policy] ??= {});
    for (const [name, region] of Object.entries(state.regions ?? {})) {
      if (!isHeard(region)) {
        regions[name] ??= null;
        continue;
      }
      const { admitted = 0, denied = 0 } = traffic.regions?.[name] ?? {};
      const [a, d] = regions[name] ?? [0, 0];
      regions[name] = [a + (admitted - a) / n, d + (denied - d) / n];
    }
  }
}

function fillFrames(state) {
  const { step_ms: step, end_ms: end, policies } = state.history ?? {};
  if (!step || !end) return;
  model.step = step;
  const frames = new Map();
  for (const [policy, history] of Object.entries(policies ?? {})) {
    for (const [region, series] of Object.entries(history.regions)) {
      const length = series.admitted.length;
      series.admitted.forEach((admitted, i) => {
        const t = Math.floor((end - (length - i) * step) / step) * step;
        const frame = frames.get(t) ?? { t, policies: {} };
        frames.set(t, frame);
        const regions = (frame.policies[policy] ??= {});
        regions[region] = admitted === null ? null : [admitted, series.denied[i]];
      });
    }
  }
  const first = model.frames.find((frame) => frame === forming)?.t ?? Infinity;
  const known = [...frames.values()].filter((frame) => frame.t < first);
  const kept = model.frames.filter((frame) => frame.t >= first);
  model.frames = [...known, ...kept].sort((a, b) => a.t - b.t).slice(-FRAMES_MAX);
}
