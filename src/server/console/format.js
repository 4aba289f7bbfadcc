// Numbers, with their units.

const MICRO = 1_000_000;

function digits(n) {
  const abs = Math.abs(n);
  if (abs >= 1e9) return `${trim(n / 1e9)}G`;
  if (abs >= 1e6) return `${trim(n / 1e6)}M`;
  if (abs >= 10_000) return `${trim(n / 1e3)}k`;
  if (abs >= 100 || Number.isInteger(n)) return Math.round(n).toLocaleString("en");
  return trim(n);
}

function trim(n) {
  const abs = Math.abs(n);
  return n.toFixed(abs >= 100 ? 0 : abs >= 10 ? 1 : 2).replace(/\.?0+$/, "");
}

/** Thousandths of a token a second. */
export function rate(milli) {
  return perSecond((milli ?? 0) / 1000);
}

/** Micro-tokens a second. */
export function microRate(micro) {
  return perSecond((micro ?? 0) / MICRO);
}

/** Of one unit wherever it can be: what stands in a column is to be compared. Only what is very slow has another. */
function perSecond(n) {
  const abs = Math.abs(n);
  if (abs === 0 || abs >= 0.01) return `${digits(n)}/s`;
  return abs * 3600 >= 0.5 ? `${digits(n * 3600)}/h` : `${digits(n * 86_400)}/d`;
}

/** Micro-tokens. */
export function tokens(micro) {
  return micro === undefined || micro === null ? "–" : digits(micro / MICRO);
}

export function count(n) {
  return digits(n);
}

/** Milliseconds. */
export function duration(ms) {
  if (ms === undefined || ms === null) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const seconds = Math.floor(ms / 1000);
  if (seconds < 120) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h` : `${Math.floor(hours / 24)} d`;
}

/** Microseconds of a round trip. */
export function trip(us) {
  if (us === undefined || us === null) return "–";
  const ms = us / 1000;
  return `${ms >= 10 ? Math.round(ms) : ms.toFixed(1)} ms`;
}

/** The time of day. */
export function clock(ms) {
  const date = new Date(ms);
  const two = (n) => String(n).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  const today = date.toDateString() === new Date().toDateString();
  return today ? time : `${two(date.getDate())}.${two(date.getMonth() + 1)}. ${time}`;
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}
