// One bucket in every region.

import { h } from "./dom.js";
import { api, model, reason } from "./model.js";
import * as f from "./format.js";
import { badge, bar, bookShares, bucketLink, empty, regionName } from "./parts.js";
import { hotTable } from "./overview.js";
import { reset } from "./change.js";

const REFRESH_MS = 2_000;
let redraw = () => {};
let chosen = "";
/** `{ path, view, error, at }` of the bucket that is shown. */
let shown = {};
let timer;
/** Set once a daemon has said that it cannot reset. */
let noReset = false;

export function bucketView(again, policy, id) {
  redraw = again;
  const path = id && `v1/buckets/${encodeURIComponent(policy)}/${encodeURIComponent(id)}`;
  if (path !== shown.path) {
    shown = { path };
    if (path) load(path);
  }
  if (policy) chosen ||= policy;
  return [h("h1", {}, "Buckets"), form(policy), result(policy, id), !id && hot()];
}

/** Nothing is asked for while the view is not shown. */
export function leaveBucket() {
  clearTimeout(timer);
  shown = {};
}

function form(policy) {
  const policies = model.state.policies;
  const name = chosen || policy || policies[0]?.name || "";
  const known = policies.find((p) => p.name === name) ?? policies[0];
  return h(
    "form",
    { class: "card lookup", role: "search", "aria-label": "Look a bucket up", onsubmit: submit },
    h(
      "label",
      {},
      "Policy",
      h(
        "select",
        {
          name: "policy",
          onchange: (event) => {
            chosen = event.target.value;
            redraw();
          },
        },
        policies.map((p) => h("option", { value: p.name, key: p.name, selected: p.name === known?.name }, p.name)),
      ),
    ),
    (known?.keys ?? []).map((key, i) =>
      h(
        "label",
        { key: `${known.name} ${i} ${key}` },
        key,
        h("input", { name: `key ${i}`, required: true, autocomplete: "off", spellcheck: "false" }),
      ),
    ),
    h("button", { type: "submit", class: "primary" }, "Look up"),
  );
}

async function submit(event) {
  event.preventDefault();
  const name = event.target.elements.policy.value;
  const policy = model.state.policies.find((p) => p.name === name);
  const pairs = (policy?.keys ?? []).map((key, i) => [key, event.target.elements[`key ${i}`]?.value ?? ""]);
  const query = new URLSearchParams(pairs);
  const answer = await api(`v1/buckets/${encodeURIComponent(name)}?${query}`).catch(() => undefined);
  if (answer?.ok) location.hash = bucketLink(name, answer.json.bucket);
  else shown = { ...shown, view: undefined, error: answer ? reason(answer) : "the daemon gives no answer" };
  if (answer?.ok) lookedUp.set(answer.json.bucket, pairs);
  redraw();
}

/** Keys and values of the buckets that were looked up, by id. */
const lookedUp = new Map();

function whatOf(id) {
  const pairs = (lookedUp.get(id) ?? []).map(([key, value]) => `${key}=${value}`);
  return pairs.join(", ") || (model.state.hottest ?? []).find((bucket) => bucket.bucket === id)?.what || "";
}

async function load(path) {
  clearTimeout(timer);
  const answer = await api(path).catch(() => undefined);
  if (shown.path !== path) return;
  if (answer?.ok) shown = { path, view: answer.json, at: Date.now() };
  else shown = { ...shown, error: answer ? reason(answer) : "the daemon gives no answer" };
  redraw();
  timer = setTimeout(() => (document.hidden ? later(path) : load(path)), REFRESH_MS);
}

function later(path) {
  timer = setTimeout(() => (document.hidden ? later(path) : load(path)), REFRESH_MS);
}

function result(policyName, id) {
  const { view, error } = shown;
  if (error) return h("p", { class: "problem", role: "alert" }, error);
  if (!id) return "";
  if (!view) return h("p", { class: "muted" }, "Asking every region…");
  const policy = model.state.policies.find((p) => p.name === policyName);
  const what = whatOf(id);
  return h(
    "section",
    { "aria-labelledby": "bucket", class: "bucket-result" },
    h(
      "div",
      { class: "section-head" },
      h("h2", { id: "bucket" }, what || "Bucket"),
      h("span", { class: "muted" }, policyName),
      policy && h("span", { class: `badge mode ${policy.mode}` }, policy.mode),
      h("code", { class: "muted small" }, view.bucket),
      model.token !== undefined && !noReset && h("button", { class: "danger", onclick: () => doReset(policyName, id) }, "Reset…"),
    ),
    view.books && books(view.books),
    table(view),
    h("p", { class: "muted small" }, "Refreshed every two seconds. Levels are what each region's own store says."),
  );
}

function books(all) {
  const bars = ["rate", "burst"].filter((unit) => all[`whole_${unit}`] > 0);
  return h(
    "div",
    { class: "pair" },
    bars.map((unit) => {
      const share = bookShares(all, unit);
      const name = unit === "rate" ? "Rate" : "Burst";
      return h("div", { class: "card", key: unit }, h("h3", {}, name, " ", h("b", {}, share.show(share.whole))), bar(share, name));
    }),
  );
}

function table(view) {
  const head = ["Region", "Holds now", "Refills by", "Reserve", "Lease"];
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "This bucket in every region" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, head.map((text, i) => h("th", { scope: "col", class: i ? "n" : "" }, text)))),
      h(
        "tbody",
        {},
        view.regions.map((region) => {
          const level = region.level ?? undefined;
          return h(
            "tr",
            { key: region.region, class: region.reachable ? "" : "silent" },
            h("th", { scope: "row" }, regionName(region.region), !region.reachable && [" ", badge("bad", "cut off")]),
            h("td", { class: "n" }, level === undefined ? (region.reachable ? "no answer" : "not known") : `${f.tokens(level)} of ${f.tokens(region.cap)}`),
            h("td", { class: "n" }, level === undefined ? "–" : f.microRate(region.rate)),
            h("td", { class: "n" }, `${f.tokens(region.reserve_cap)} + ${f.microRate(region.reserve_rate)}`),
            h("td", { class: "n" }, region.lease ? `${f.tokens(region.lease.burst)} + ${f.microRate(region.lease.rate)} for ${f.duration(region.lease.left_ms)}` : "none"),
          );
        }),
        view.pool_level !== undefined &&
          view.pool_level !== null &&
          h(
            "tr",
            { key: "pool" },
            h("th", { scope: "row" }, "Free pool"),
            h("td", { class: "n" }, f.tokens(view.pool_level)),
            h("td", { class: "n" }, f.microRate(Math.max(0, view.pool_rate ?? 0))),
            h("td", { class: "n" }, "–"),
            h("td", { class: "n" }, "–"),
          ),
      ),
    ),
  );
}

/** Of the bucket that is shown, whatever is in the form. */
async function doReset(policy, id) {
  const known = model.state.policies.find((p) => p.name === policy);
  const values = (lookedUp.get(id) ?? []).map(([, value]) => value);
  const answer = await reset(policy, known?.keys ?? [], whatOf(id), values);
  if (answer === "unknown") noReset = true;
  redraw();
}

function hot() {
  const all = model.state.hottest ?? [];
  return h(
    "section",
    { "aria-labelledby": "hottest" },
    h("h2", { id: "hottest" }, "Hottest buckets"),
    all.length ? hotTable(all) : empty("No bucket has had demand within the last minute.", "Send requests, or look one up above."),
  );
}
