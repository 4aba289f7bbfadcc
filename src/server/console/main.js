// The page: its head, what it shows, and what it says when the line is lost.

import { announce, draw, h } from "./dom.js";
import { model, start, watch, watchEvents } from "./model.js";
import * as f from "./format.js";
import { badge } from "./parts.js";
import { overview } from "./overview.js";
import { policyView } from "./policy.js";
import { bucketView, leaveBucket } from "./bucket.js";
import { eventsView } from "./events.js";
import { changeView, fillEditor, lock, unlock } from "./change.js";

const VIEWS = [
  ["overview", "Overview"],
  ["buckets", "Buckets"],
  ["events", "Events"],
  ["change", "Change"],
];
const THEMES = ["auto", "light", "dark"];

let view = "";

function route() {
  const [name = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decode);
  return [name || "overview", ...rest];
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function page() {
  document.body.classList.toggle("lost", model.line === "lost");
  draw(document.getElementById("top"), head());
  const main = document.getElementById("main");
  if (!model.state) {
    draw(main, h("div", { class: "empty" }, h("p", {}, model.line === "lost" ? "The daemon gives no answer. Trying again…" : "Connecting…")));
    return;
  }
  draw(main, banners(), body());
  fillEditor();
}

function body() {
  const [name, ...rest] = route();
  switch (name) {
    case "policies":
      return policyView(rest[0]);
    case "buckets":
      return bucketView(page, rest[0], rest[1]);
    case "events":
      return eventsView(page);
    case "change":
      return changeView(page);
    default:
      return overview(page);
  }
}

function head() {
  const [name] = route();
  const current = name === "policies" ? "overview" : name;
  return [
    h(
      "div",
      { class: "brand" },
      h("a", { href: "#/", class: "logo", "aria-label": "Quorate, overview" }, h("span", { class: "dot", "aria-hidden": "true" }), "Quorate"),
      model.state && h("span", { class: "cluster" }, model.state.cluster, h("span", { class: "muted" }, ` from ${model.state.region}`)),
    ),
    h(
      "nav",
      { "aria-label": "Views" },
      VIEWS.map(([id, title]) => h("a", { href: `#/${id === "overview" ? "" : id}`, key: id, "aria-current": id === current ? "page" : undefined }, title)),
    ),
    h("div", { class: "tools" }, lineBadge(), theme(), lockButton()),
  ];
}

function lineBadge() {
  if (model.line === "live") return h("span", { class: "line ok", title: "Updates arrive every second" }, h("span", { class: "pulse", "aria-hidden": "true" }), "Live");
  return h("span", { class: "line bad" }, model.line === "lost" ? "Line lost" : "Connecting");
}

function lockButton() {
  if (!model.state) return "";
  return model.token === undefined
    ? h("button", { class: "quiet", onclick: unlock }, "Allow changes…")
    : h("button", { class: "quiet allowed", onclick: lock, title: "This page may change things" }, "Changes allowed · lock");
}

function theme() {
  const now = document.documentElement.dataset.theme ?? "auto";
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  const names = { auto: "Auto", light: "Light", dark: "Dark" };
  return h("button", { class: "quiet", "aria-label": `Theme: ${names[now]}. Switch to ${names[next]}`, onclick: () => setTheme(next) }, { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[now]);
}

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("theme", name);
  } catch {
    // It lasts as long as the page.
  }
  page();
}

function banners() {
  const state = model.state;
  const all = [];
  const banner = (key, kind, title, text) => all.push(h("div", { class: `banner ${kind}`, key, "data-banner": key }, badge(kind, title), h("span", {}, text)));
  if (model.line === "lost") {
    banner("line", "bad", "Connection lost", `No word from the daemon in ${state.region} for ${f.duration(Date.now() - model.heard)}. What you see is as of ${f.clock(model.heard)}. Trying again…`);
  }
  const regions = Object.entries(state.regions ?? {});
  const me = regions.find(([, region]) => region.me)?.[1];
  if (me?.said?.quorum === false) {
    banner("quorum", "bad", "No quorum", `${state.region} reaches no majority of the voters: it goes on with its reserves and with what it holds until leases end. Others may be well: look from another region.`);
  } else if (!state.raft?.leader) {
    banner("leader", "warn", "No leader", "An election is under way: no new leases until it is over.");
  }
  const away = regions.filter(([, region]) => !region.reachable);
  if (away.length > 0) {
    const words = away.map(([name, region]) => `${name} (${region.age_ms === undefined || region.age_ms === null ? "never heard" : `last heard ${f.duration(region.age_ms)} ago`})`);
    banner("away", "bad", "Cut off", `${words.join(", ")} ${away.length === 1 ? "does" : "do"} not answer ${state.region}. A region that is cut off goes on with its reserves, and with its leases until they end; the rest of the cluster then has those.`);
  }
  for (const [name, region] of regions.filter(([, region]) => region.reachable && region.said?.store && region.said.store.kind && !region.said.store.attached)) {
    banner(`store-${name}`, "bad", "Store away", `${name}: ${region.said.store.why ?? "not attached"}. Requests there go by each policy's on_store_failure.`);
  }
  if ((state.hottest ?? []).some((bucket) => bucket.books?.frozen)) {
    banner("books", "bad", "Books do not balance", "A bucket is frozen: nothing is lent from it. A person must look: see docs/operations.md.");
  }
  return all.length > 0 && h("div", { class: "banners", key: "banners", role: "region", "aria-label": "Warnings" }, all);
}

function moved() {
  const next = route()[0];
  if (next !== "buckets") leaveBucket();
  const other = next !== view;
  view = next;
  page();
  if (other) {
    scrollTo(0, 0);
    document.getElementById("main").focus({ preventScroll: true });
    const title = VIEWS.find(([id]) => id === next)?.[1] ?? route()[1] ?? "";
    document.title = `${title} · Quorate`;
  }
}

try {
  const kept = localStorage.getItem("theme");
  if (kept && kept !== "auto" && THEMES.includes(kept)) document.documentElement.dataset.theme = kept;
} catch {
  // Storage is not allowed: the system's theme counts.
}
view = route()[0];
watch(page);
watchEvents((event) => {
  // Not chatty: only what a person would want to be interrupted for.
  if (event.level !== "info") announce(event.text);
});
addEventListener("hashchange", moved);
page();
start();
