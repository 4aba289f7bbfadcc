// Everything at a glance: the regions, and how each policy's limit is shared and used.

import { h } from "./dom.js";
import { model } from "./model.js";
import * as f from "./format.js";
import { badge, bar, bucketLink, busiest, empty, health, limitRate, limitWords, policyLink, regionName, regionNames, shares, stale, sums } from "./parts.js";
import { sparkline } from "./chart.js";
import { lead } from "./change.js";

/** More policies than this are not drawn at once. */
const SHOWN = 60;
let filter = "";
let redraw = () => {};

export function overview(again) {
  redraw = again;
  const { regions, policies } = model.state;
  return [
    h("h1", { class: "unseen" }, "Overview"),
    h(
      "section",
      { "aria-labelledby": "regions" },
      h("h2", { id: "regions" }, "Regions"),
      h("div", { class: "regions" }, Object.entries(regions ?? {}).map(([name, region]) => regionCard(name, region))),
    ),
    h("section", { "aria-labelledby": "policies" }, policiesHead(policies), policyCards(policies)),
    hottest(),
  ];
}

function regionCard(name, region) {
  const is = health(name, region);
  const said = region.said ?? {};
  const totals = totalsOf(name);
  const store = said.store ?? {};
  const silent = !region.reachable;
  const fact = (term, ...value) => h("div", {}, h("dt", {}, term), h("dd", {}, value));
  return h(
    "article",
    { class: `card region ${is.kind} ${silent ? "silent" : ""}`, key: name, "aria-label": `Region ${name}: ${is.text}`, "data-region": name, "data-health": is.text },
    h(
      "header",
      {},
      h("h3", {}, regionName(name)),
      region.role === "leader" && h("span", { class: "badge lead", title: "Its log is the cluster's" }, "Leader"),
      region.role === "learner" && badge("plain", "Learner", "Follows the log without a vote"),
      region.witness && badge("plain", "Witness", "Votes, has no part of any limit, and serves nobody"),
      region.standing === "leaving" && badge("warn", "Leaving"),
      region.me && h("span", { class: "badge plain" }, "You are here"),
    ),
    h("p", { class: "health" }, badge(is.kind, is.text), is.detail && h("span", { class: "muted" }, ` ${is.detail}`)),
    h(
      "dl",
      { class: "facts" },
      fact("Round trip", region.me ? "here" : silent ? "–" : f.trip(region.rtt_us)),
      !region.witness && fact("Store", storeWords(store)),
      !region.witness && fact("Admits", h("b", {}, f.rate(totals.admitted)), totals.buckets && ""),
      !region.witness && fact("Denies", totals.denied > 0 ? h("b", { class: "denies" }, f.rate(totals.denied)) : "0/s"),
    ),
    model.token !== undefined &&
      region.role === "voter" &&
      region.reachable &&
      h("button", { class: "quiet", onclick: () => lead(name) }, "Make it the leader…"),
  );
}

function storeWords(store) {
  if (!store.kind) return "–";
  const kind = store.kind === "redis" ? "Redis" : "in memory";
  if (!store.attached) return badge("bad", `${kind} away`);
  const trip = store.kind === "redis" ? ` ${f.trip(store.rtt_us)}` : "";
  return [`${kind}${trip}`, store.evicts && [" ", badge("warn", "evicts keys")]];
}

function totalsOf(region) {
  const rates = Object.values(model.state.traffic ?? {}).map((traffic) => traffic.regions?.[region] ?? {});
  const sum = (field) => rates.reduce((total, rate) => total + (rate[field] ?? 0), 0);
  return { admitted: sum("admitted"), denied: sum("denied") };
}

function policiesHead(policies) {
  const version = model.state.policies_version;
  return h(
    "div",
    { class: "section-head" },
    h("h2", { id: "policies" }, "Policies"),
    h("span", { class: "muted" }, `version ${version}`),
    model.state.policies_settled ? "" : badge("warn", "settling", "Not every region goes by this version yet"),
    policies.length > 8 &&
      h("input", {
        type: "search",
        placeholder: "Filter",
        "aria-label": "Filter policies by name",
        oninput: (event) => {
          filter = event.target.value;
          redraw();
        },
      }),
  );
}

function policyCards(policies) {
  if (policies.length === 0) return empty("There are no policies.", "Requests match nothing, and go by `unmatched` in region.yaml.");
  const matching = policies.filter((policy) => policy.name.includes(filter) || policy.domain.includes(filter));
  const recent = new Set(model.frames.flatMap((frame) => Object.keys(frame.policies)));
  const busy = matching.filter((policy) => recent.has(policy.name));
  const idle = matching.filter((policy) => !recent.has(policy.name));
  const more = Math.max(0, busy.length - SHOWN) + Math.max(0, idle.length - SHOWN);
  return [
    h("div", { class: "policies" }, busy.slice(0, SHOWN).map(policyCard)),
    idle.length > 0 &&
      h(
        "div",
        { class: "card idle" },
        h("h3", { class: "muted" }, busy.length > 0 ? "Without demand in the last five minutes" : "No policy has had demand in the last five minutes"),
        h("ul", {}, idle.slice(0, SHOWN).map(idleRow)),
      ),
    more > 0 && h("p", { class: "muted" }, `${f.count(more)} more: filter by name.`),
  ];
}

function policyCard(policy) {
  const traffic = model.state.traffic?.[policy.name];
  const { admitted, denied, fallbacks } = sums(traffic);
  const limited = policy.rate !== undefined && policy.rate !== null;
  const limit = limited ? limitRate(policy, traffic) : undefined;
  return h(
    "article",
    { class: "card policy", key: policy.name, "aria-label": `Policy ${policy.name}` },
    h(
      "div",
      { class: "what" },
      h("h3", {}, h("a", { href: policyLink(policy.name) }, policy.name)),
      h(
        "p",
        {},
        h("span", { class: `badge mode ${limited ? policy.mode : "plain"}` }, limited ? policy.mode : "unlimited"),
        policy.shadow && [" ", badge("plain", "shadow", "It only counts")],
        fallbacks > 0 && [" ", badge("bad", `on_store_failure: ${policy.on_store_failure}`)],
      ),
      limited && h("p", { class: "limit-words" }, h("b", {}, policy.limit)),
      h("p", { class: "muted small" }, `${policy.domain} · ${policy.matches}`),
    ),
    h(
      "div",
      { class: `shared ${stale() && policy.mode !== "split" ? "stale" : ""}` },
      h("h4", {}, limited ? shareTitle(traffic) : "No limit", limited && policy.mode !== "split" && stale() && ` (${stale()})`),
      limited && bar(shares(policy, traffic), `How ${policy.name} is shared`),
    ),
    h(
      "div",
      { class: "passes" },
      h(
        "div",
        { class: "now" },
        h("span", {}, "admits ", h("b", {}, f.rate(admitted)), unheard()),
        h("span", { class: denied > 0 ? "denies" : "muted" }, "denies ", h("b", {}, f.rate(denied))),
      ),
      sparkline(policy.name, limit),
      h("p", { class: "muted small" }, "last 5 min", limited && limitWords(policy, traffic) && ` · ${limitWords(policy, traffic)}`),
      limited && busiestWords(policy),
    ),
  );
}

function busiestWords(policy) {
  const found = busiest(policy);
  if (!found) return "";
  const percent = Math.round(found.part * 100);
  return h(
    "p",
    { class: "small busiest" },
    h("a", { href: bucketLink(policy.name, found.bucket.bucket) }, found.bucket.what || found.bucket.bucket),
    h("span", { class: "muted" }, percent > 100 ? ` admits ${f.rate(found.bucket.admitted)}, out of its burst` : ` uses ${percent}% of its rate`),
  );
}

/** A policy without demand: one line. */
function idleRow(policy) {
  const limited = policy.rate !== undefined && policy.rate !== null;
  return h(
    "li",
    { key: policy.name },
    h("a", { href: policyLink(policy.name) }, policy.name),
    h("span", { class: `badge mode ${limited ? policy.mode : "plain"}` }, limited ? policy.mode : "unlimited"),
    policy.shadow && badge("plain", "shadow", "It only counts"),
    h("span", {}, limited ? policy.limit : ""),
    h("span", { class: "muted small" }, `${policy.domain} · ${policy.matches}`),
  );
}

/** Regions whose part of a sum is not known. */
function unheard() {
  const away = Object.entries(model.state.regions ?? {}).filter(([, region]) => !region.reachable).map(([name]) => name);
  return away.length > 0 && h("span", { class: "muted small" }, ` without ${away.join(", ")}`);
}

function shareTitle(traffic) {
  const buckets = traffic?.buckets;
  if (!traffic?.books) return "Each bucket";
  if (buckets === 1) return "The one bucket with demand";
  return buckets > 1 ? `${buckets} buckets with demand` : "The busiest buckets";
}

function hottest() {
  const hot = model.state.hottest ?? [];
  if (hot.length === 0) return "";
  return h(
    "section",
    { "aria-labelledby": "hottest" },
    h("h2", { id: "hottest" }, "Hottest buckets"),
    hotTable(hot.slice(0, 8)),
  );
}

/** Buckets with their rates, and what is left of them by region. */
export function hotTable(hot, withPolicy = true) {
  const names = regionNames();
  const column = (text, props = {}) => h("th", { scope: "col", ...props }, text);
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Hottest buckets" },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          column("Bucket"),
          withPolicy && column("Policy"),
          column("Admitted", { class: "n" }),
          column("Denied", { class: "n" }),
          names.map((name) => h("th", { scope: "col", class: "n", key: name }, regionName(name), h("small", { class: "muted" }, " admits · left"))),
        ),
      ),
      h(
        "tbody",
        {},
        hot.map((bucket) =>
          h(
            "tr",
            { key: `${bucket.policy} ${bucket.bucket}` },
            h("th", { scope: "row" }, h("a", { href: bucketLink(bucket.policy, bucket.bucket), class: "bucket" }, bucket.what || bucket.bucket)),
            withPolicy && h("td", {}, bucket.policy),
            h("td", { class: "n" }, f.rate(bucket.admitted)),
            h("td", { class: `n ${bucket.denied > 0 ? "denies" : ""}` }, f.rate(bucket.denied)),
            names.map((name) => {
              const part = bucket.regions?.[name];
              const silent = !model.state.regions[name].reachable;
              const left = part?.remaining ?? undefined;
              const words = part?.admitted === undefined || left === undefined ? "–" : `${f.rate(part.admitted)} · ${f.count(left)}`;
              return h("td", { class: `n ${silent ? "silent" : ""}`, key: name }, words);
            }),
          ),
        ),
      ),
    ),
  );
}
