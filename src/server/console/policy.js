// One policy: what it promises, what passes, and what each region would still admit if it were cut off now.

import { h } from "./dom.js";
import { model } from "./model.js";
import * as f from "./format.js";
import { badge, bar, bound, empty, limitRate, limitWords, regionName, shares, stale } from "./parts.js";
import { chart } from "./chart.js";
import { hotTable } from "./overview.js";

export function policyView(name) {
  const policy = model.state.policies.find((p) => p.name === name);
  if (!policy) return [h("h1", {}, name), empty("There is no such policy.", "It may have been removed: the events say when.")];
  const traffic = model.state.traffic?.[name];
  const limited = policy.rate !== undefined && policy.rate !== null;
  const hot = (model.state.hottest ?? []).filter((bucket) => bucket.policy === name);
  return [
    h(
      "div",
      { class: "section-head title" },
      h("h1", {}, policy.name),
      h("span", { class: `badge mode ${limited ? policy.mode : "plain"}` }, limited ? policy.mode : "unlimited"),
      policy.shadow && badge("plain", "shadow", "It only counts"),
      h("span", { class: "muted" }, `${policy.domain} · ${policy.matches}`),
    ),
    limited && promise(policy),
    h(
      "section",
      { "aria-labelledby": "passes" },
      h("h2", { id: "passes" }, "What passes"),
      chart(name, limited ? limitRate(policy, traffic) : undefined, limited ? limitWords(policy, traffic) : ""),
    ),
    limited && h("section", { "aria-labelledby": "shared" }, h("h2", { id: "shared" }, "How it is shared", policy.mode !== "split" && stale() && h("small", { class: "muted" }, ` ${stale()}`)), sharedBars(policy, traffic)),
    limited && cutOff(policy, hot),
    h(
      "section",
      { "aria-labelledby": "hottest" },
      h("h2", { id: "hottest" }, "Hottest buckets"),
      hot.length ? hotTable(hot, false) : empty("No bucket has had demand within the last minute."),
    ),
  ];
}

function promise(policy) {
  const cut = {
    strict: "Never more than that, whatever is partitioned, restarted or lost. A region that is cut off goes on with its reserve.",
    approximate: "Never more than that. A region that is cut off goes on with its reserve and its part of the overshoot.",
    split: "Each region has a fixed part, and needs no word from the others.",
  }[policy.mode];
  return h(
    "div",
    { class: "promise" },
    h("p", {}, "In any window of T seconds all regions together admit at most ", h("b", {}, bound(policy.guarantee)), " tokens for each bucket."),
    h("p", { class: "muted" }, cut, ` While its store is away a region ${{ allow: "lets everything through", deny: "denies", local: "counts in memory" }[policy.on_store_failure]} (on_store_failure: ${policy.on_store_failure}).`),
  );
}

function sharedBars(policy, traffic) {
  const share = shares(policy, traffic);
  const first = bar(share, share.unit === "rate" ? "Rate" : "Burst");
  if (share.unit !== "rate" || policy.mode === "split" || !traffic?.books) {
    return h("div", { class: "card" }, h("h3", {}, share.unit === "rate" ? "Rate of each bucket" : "Burst of each bucket"), first);
  }
  const burst = shares({ ...policy, rate: 0 }, traffic);
  const of = share.buckets === undefined || share.buckets === null ? "the busiest buckets" : f.plural(share.buckets, "bucket");
  return h(
    "div",
    { class: "pair" },
    h("div", { class: "card" }, h("h3", {}, `Rate of ${of} with demand`), first),
    h("div", { class: "card" }, h("h3", {}, `Burst of ${of} with demand`), bar(burst, "Burst")),
  );
}

/** For the hottest bucket, or for one that nobody has asked for: at once, while the lease runs, and from then on. */
function cutOff(policy, hot) {
  const bucket = hot[0];
  return h(
    "section",
    { "aria-labelledby": "cutoff" },
    h("h2", { id: "cutoff" }, "If a region were cut off now"),
    h("p", { class: "muted" }, bucket ? ["it would still admit, of the hottest bucket ", h("b", {}, bucket.what || bucket.bucket), ":"] : "it would still admit, of each bucket:"),
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "What each region would still admit" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h("tr", {}, ["Region", "At once", "While its lease runs", "From then on"].map((text, i) => h("th", { scope: "col", class: i ? "n" : "" }, text))),
        ),
        h("tbody", {}, policy.parts.map((part) => cutOffRow(part, bucket?.regions?.[part.region], Boolean(bucket)))),
      ),
    ),
  );
}

function cutOffRow(part, hot, known) {
  const region = model.state.regions[part.region];
  const silent = region && !region.reachable;
  const level = hot?.level ?? undefined;
  const atOnce = level !== undefined ? f.tokens(level) : known ? `at most ${f.tokens(part.burst + part.overdraft)}` : f.tokens(part.burst + part.overdraft);
  const lease = hot?.lease;
  const leased = lease ? `${f.microRate(lease.rate + part.rate)} for ${f.duration(lease.left_ms)}` : "no lease";
  return h(
    "tr",
    { key: part.region, class: silent ? "silent" : "" },
    h("th", { scope: "row" }, regionName(part.region), silent && [" ", badge("bad", `cut off ${region.age_ms ? `for ${f.duration(region.age_ms)}` : ""}`)]),
    h("td", { class: "n" }, atOnce),
    h("td", { class: "n" }, leased),
    h("td", { class: "n" }, f.microRate(part.rate)),
  );
}
