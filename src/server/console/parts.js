// What several views show.

import { h } from "./dom.js";
import { model } from "./model.js";
import * as f from "./format.js";

/** A region is told by its shape as well as by its colour. */
const SHAPES = ["●", "■", "▲", "◆", "▼", "★", "✚", "◗", "⬟"];

export function regionNames() {
  const serving = Object.entries(model.state?.regions ?? {}).filter(([, region]) => !region.witness);
  return serving.map(([name]) => name).sort();
}

export function regionIndex(name) {
  // Witnesses, which nothing passes, have what comes after the regions'.
  const at = regionNames().indexOf(name);
  return (at < 0 ? SHAPES.length - 1 : at) % SHAPES.length;
}

export function colour(name) {
  return `var(--region-${regionIndex(name)})`;
}

export function shape(name) {
  return h("span", { class: "shape", style: { color: colour(name) }, "aria-hidden": "true" }, SHAPES[regionIndex(name)]);
}

export function regionName(name) {
  return h("span", { class: "region-name" }, shape(name), " ", name);
}

/** A word in a frame: `ok`, `warn`, `bad`, `plain`. */
export function badge(kind, text, title) {
  const mark = { ok: "✓", warn: "!", bad: "✕" }[kind];
  return h("span", { class: `badge ${kind}`, title }, mark && h("span", { class: "mark", "aria-hidden": "true" }, mark), text);
}

/** How a region is: what to call it, how bad it is, and since when nothing was heard. */
export function health(name, region) {
  if (!region.reachable) {
    const age = region.age_ms === undefined || region.age_ms === null ? "never heard" : `last heard ${f.duration(region.age_ms)} ago`;
    return { kind: "bad", text: "Cut off", detail: age };
  }
  if (!region.me && (region.age_ms === undefined || region.age_ms === null)) {
    return { kind: "plain", text: "Reachable", detail: "has not reported yet" };
  }
  if (region.said?.store && !region.said.store.attached) {
    return { kind: "bad", text: "Store away", detail: region.said.store.why ?? "not attached" };
  }
  if (region.said?.not_ready?.length) return { kind: "warn", text: "Not ready", detail: region.said.not_ready.join("; ") };
  if (region.said && region.said.quorum === false) return { kind: "bad", text: "No quorum", detail: "goes on with what it holds" };
  return { kind: "ok", text: "Healthy", detail: "" };
}

/** What a policy's limit consists of, in its own unit: `[{ kind, region, value }]`, and the whole. */
export function shares(policy, traffic) {
  const books = traffic?.books;
  const unit = policy.rate > 0 ? "rate" : "burst";
  const show = unit === "rate" ? f.microRate : f.tokens;
  if (policy.mode === "split") {
    const segments = policy.parts.map((part) => ({ kind: "part", region: part.region, value: part[unit] }));
    return { unit, show, whole: policy[unit], segments, buckets: 1 };
  }
  if (books) return { ...bookShares(books, unit), show, buckets: traffic.buckets };
  const reserved = policy.parts.reduce((sum, part) => sum + part[unit] + (unit === "burst" ? part.overdraft : 0), 0);
  const whole = policy[unit] + (unit === "burst" ? policy.overshoot : 0);
  const segments = [
    { kind: "reserve", value: reserved },
    { kind: "free", value: Math.max(0, whole - reserved) },
  ];
  return { unit, show, whole, segments, buckets: 0 };
}

/** The same of a bucket's books. */
export function bookShares(books, unit) {
  const segments = [
    { kind: "reserve", value: books[`reserved_${unit}`] },
    ...books.lent.filter((lent) => lent[unit] > 0).map((lent) => ({ kind: "lease", region: lent.region, value: lent[unit] })),
    { kind: "free", value: Math.max(0, books[`free_${unit}`]) },
  ];
  const show = unit === "rate" ? f.microRate : f.tokens;
  return { unit, show, whole: books[`whole_${unit}`], segments, frozen: books.frozen, over: Math.max(0, -books[`free_${unit}`]) };
}

const KINDS = { reserve: "reserve", lease: "lease", free: "free pool", part: "part" };

/** A stacked bar, and the same in words below it. */
export function bar({ whole, segments, show, over, frozen }, label) {
  const total = Math.max(whole, segments.reduce((sum, segment) => sum + segment.value, 0), 1);
  const named = (segment) => (segment.region ? `${segment.region} ${segment.kind === "part" ? "" : "lease "}`.trim() : KINDS[segment.kind]);
  const words = segments.map((segment) => `${named(segment)} ${show(segment.value)}`).join(", ");
  return h(
    "div",
    { class: "share" },
    h(
      "div",
      { class: "bar", role: "img", "aria-label": `${label}: ${words} of ${show(whole)}` },
      segments
        .filter((segment) => segment.value > 0)
        .map((segment) =>
          h(
            "span",
            {
              class: `segment ${segment.kind}`,
              key: `${segment.kind}-${segment.region ?? ""}`,
              title: `${named(segment)}: ${show(segment.value)}`,
              style: { "flex-grow": String(segment.value / total), ...(segment.region && { "--colour": colour(segment.region) }) },
            },
            segment.region ? SHAPES[regionIndex(segment.region)] : "",
          ),
        ),
    ),
    h(
      "ul",
      { class: "legend" },
      segments
        .filter((segment) => segment.value > 0 || segment.kind !== "part")
        .map((segment) =>
          h(
            "li",
            { key: `${segment.kind}-${segment.region ?? ""}` },
            segment.region ? shape(segment.region) : h("span", { class: `swatch ${segment.kind}`, "aria-hidden": "true" }),
            ` ${segment.region ?? KINDS[segment.kind]} `,
            h("b", {}, show(segment.value)),
          ),
        ),
      over > 0 && h("li", { key: "over" }, badge("warn", `${show(over)} lent above it, until leases end`)),
      frozen && h("li", { key: "frozen" }, badge("bad", "frozen: the books do not balance")),
    ),
  );
}

/** The sum of what passes in all regions that are heard, in thousandths of a token a second. */
export function sums(traffic) {
  const rates = Object.entries(traffic?.regions ?? {}).filter(([name]) => model.state.regions?.[name]?.reachable).map(([, rate]) => rate);
  const sum = (field) => rates.reduce((total, rate) => total + (rate[field] ?? 0), 0);
  return { admitted: sum("admitted"), denied: sum("denied"), fallbacks: sum("fallbacks") };
}

/** The limit of all buckets with demand together, in thousandths of a token a second; `undefined`: it is not known how many there are. */
export function limitRate(policy, traffic) {
  const buckets = traffic?.buckets ?? undefined;
  if (!(policy.rate > 0) || buckets === undefined) return undefined;
  return (policy.rate / 1000) * Math.max(1, buckets);
}

export function limitWords(policy, traffic) {
  if (!(policy.rate > 0)) return "";
  if (!traffic) return `limit ${f.microRate(policy.rate)}`;
  const buckets = traffic.buckets ?? undefined;
  if (buckets === undefined) return `${f.microRate(policy.rate)} for each bucket (more of them than are followed)`;
  return buckets > 1 ? `limit ${f.microRate(policy.rate)} × ${buckets} buckets` : `limit ${f.microRate(policy.rate)}`;
}

/** How much of its limit the busiest bucket of a policy uses: `{ bucket, part }`, a part of 1 for all of it. */
export function busiest(policy) {
  const bucket = (model.state.hottest ?? []).find((hot) => hot.policy === policy.name);
  if (!bucket || !(policy.rate > 0)) return undefined;
  return { bucket, part: bucket.admitted / (policy.rate / 1000) };
}

/** The bound, as `100 + 10 T`. */
export function bound(text) {
  return (text ?? "").replace(/ T \/ 1 s$/, " T");
}

/** How old the pool's books are here, where nobody keeps them up to date; empty: they are. */
export function stale() {
  const me = Object.values(model.state.regions ?? {}).find((region) => region.me);
  return me?.said?.quorum === false ? `as known here ${f.duration(model.state.raft?.age_ms ?? 0)} ago` : "";
}

export function policyLink(name) {
  return `#/policies/${encodeURIComponent(name)}`;
}

export function bucketLink(policy, id) {
  return `#/buckets/${encodeURIComponent(policy)}/${encodeURIComponent(id)}`;
}

export function empty(text, more) {
  return h("div", { class: "empty" }, h("p", {}, text), more && h("p", { class: "muted" }, more));
}
