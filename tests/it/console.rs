//! The console in a real Chromium, before three real regions: what it shows, that it follows a partition by itself, that it
//! changes things only with the token, and that it can be used by whoever does not see it.

use crate::support::browser::Browser;
use crate::support::cluster::{Cluster, Plan, REGIONS};
use crate::support::daemon::quorate;
use crate::support::load::{Ask, History, Steady};
use crate::support::{eventually, hold};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// What the page should show within seconds, on a machine that does much else.
const SOON: Duration = Duration::from_secs(20);
const TOKEN: &str = "correct-horse-battery-staple";
/// A caller may name itself so.
const HOSTILE: &str = r#"<img src=x onerror="document.title='owned'">"#;
const POLICIES: &str = "
policies:
  - { name: requests, domain: api, match: [ { key: tenant } ], limit: { rate: 40/s, burst: 40 }, mode: strict }
  - { name: searches, domain: search, match: [ { key: tenant } ], limit: { rate: 60/s, burst: 60 },
      mode: approximate, max_overshoot: 10%, on_store_failure: allow }
  - { name: logins, domain: auth, match: [ { key: account } ], limit: { rate: 6/s, burst: 6 }, mode: split }
  - { name: exports, domain: exports, match: [ { key: tenant }, { key: kind, value: csv } ], limit: { rate: 30/m, burst: 10 }, mode: strict }
  - { name: health, domain: api, match: [ { key: path, value: /healthz } ], unlimited: true }
";

/// A cluster with load on it, and a browser.
struct Fixture {
    cluster: Cluster,
    browser: Browser,
    _load: Vec<Steady>,
    _token: TempDir,
}

impl Fixture {
    async fn start() -> Self {
        let token = tempfile::tempdir().expect("a temporary folder");
        let file = token.path().join("token");
        std::fs::write(&file, TOKEN).expect("the token is written");
        let plan = Plan { policies: POLICIES.to_owned(), rtt: Duration::from_millis(80), ..Plan::default() };
        let more = format!("admin_token_file: {}\n", file.display());
        let (cluster, browser) = tokio::join!(Cluster::start_with(plan, &more), Browser::start());
        let (apis, history) = (cluster.apis(), History::default());
        let load = [
            (Ask::new("requests", "api", &[("tenant", "42")]), [25, 15, 10]),
            (Ask::new("others", "api", &[("tenant", "acme")]), [4, 3, 2]),
            (Ask::new("searches", "search", &[("tenant", "42")]), [12, 20, 10]),
            (Ask::new("logins", "auth", &[("account", HOSTILE)]), [2, 4, 2]),
        ];
        let load = load.map(|(ask, rates)| Steady::start(&ask, &apis, &rates, &history)).into();
        Self { cluster, browser, _load: load, _token: token }
    }

    fn console(&self, region: usize) -> String {
        format!("{}/console", self.cluster.daemons[region].admin().url())
    }

    /// What the page says of a region's health.
    async fn health(&self, region: usize) -> String {
        let script = "return document.querySelector(`[data-region='${arguments[0]}']`)?.dataset.health ?? ''";
        let health = self.browser.run(script, json!([REGIONS[region]])).await;
        health.as_str().unwrap_or_default().to_owned()
    }

    async fn shows_health(&self, region: usize, wanted: &str, within: Duration) {
        let what = format!("the page says of {} that it is {wanted}", REGIONS[region]);
        eventually(&what, within, || async {
            let health = self.health(region).await;
            hold(health == wanted, || health)
        })
        .await;
    }

    /// Pictures of what is shown, in both widths and themes.
    async fn pictures(&self, name: &str) {
        if std::env::var_os("CONSOLE_SHOTS").is_none() {
            return;
        }
        for (width, height) in [(1280, 800), (400, 800)] {
            for theme in ["light", "dark"] {
                self.browser.resize(width, height).await;
                self.browser.theme(theme).await;
                self.browser.picture(&format!("{name}-{width}-{theme}")).await;
            }
        }
        self.browser.resize(1280, 800).await;
        self.browser.theme("light").await;
    }

    async fn no_complaints(&self) {
        let complaints = self.browser.complaints().await;
        assert!(complaints.is_empty(), "the browser complains: {complaints:#?}");
    }

    async fn go(&self, hash: &str) {
        self.browser.run("location.hash = arguments[0]", json!([hash])).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_shows_the_cluster_and_follows_a_partition_without_a_reload() {
    let mut fixture = Fixture::start().await;
    let leader = fixture.cluster.agreed_leader(SOON, &[0, 1, 2]).await;
    let (here, alone) = ((leader + 1) % 3, (leader + 2) % 3);
    let browser = &fixture.browser;
    browser.resize(1280, 800).await;
    browser.open(&fixture.console(here)).await;
    browser.run("window.loadedOnce = true", json!([])).await;

    for (region, name) in REGIONS.iter().enumerate() {
        fixture.shows_health(region, "Healthy", SOON).await;
        browser.shows(&format!("[data-region='{name}']"), "Redis", SOON).await;
    }
    browser.shows(&format!("[data-region='{}']", REGIONS[leader]), "Leader", SOON).await;
    browser.shows(&format!("[data-region='{}']", REGIONS[here]), "You are here", SOON).await;
    browser.shows(".policy", "limit 40/s × 2 buckets", SOON).await;
    browser.shows(".policy .bar + .legend", "free pool", SOON).await;
    browser.shows(".idle", "exports", SOON).await;
    browser.shows("table", "tenant=42", SOON).await;
    fixture.pictures("overview-load").await;

    // A caller's text stays text.
    browser.shows("table", HOSTILE, SOON).await;
    let made = browser.run("return document.querySelectorAll('main img').length", json!([])).await;
    assert_eq!((made, browser.run("return document.title", json!([])).await), (json!(0), json!("Quorate")));

    fixture.go("#/policies/requests").await;
    browser.shows("h1", "requests", SOON).await;
    browser.shows(".promise", "at most 40 + 40 T tokens", SOON).await;
    for region in REGIONS {
        browser.shows("section[aria-labelledby=cutoff] table", region, SOON).await;
    }
    fixture.pictures("policy-load").await;
    fixture.no_complaints().await;

    fixture.go("#/").await;
    fixture.cluster.cut_off(alone);
    let cut = Instant::now();
    fixture.shows_health(alone, "Cut off", SOON).await;
    println!("the page shows the partition {:?} after the line was cut", cut.elapsed());
    browser.shows("[data-banner=away]", REGIONS[alone], SOON).await;
    let silent = format!("[data-region='{}'].silent", REGIONS[alone]);
    browser.shows(&silent, "last heard", SOON).await;
    assert_eq!(fixture.health(here).await, "Healthy");
    fixture.pictures("overview-partition").await;
    fixture.go("#/policies/requests").await;
    browser.shows("section[aria-labelledby=cutoff] tr.silent", REGIONS[alone], SOON).await;
    fixture.pictures("policy-partition").await;
    fixture.go("#/events").await;
    browser.shows(".events li.warn", &format!("{} does not answer", REGIONS[alone]), SOON).await;
    fixture.pictures("events-partition").await;
    let loaded = browser.run("return window.loadedOnce", json!([])).await;
    assert_eq!(loaded, json!(true), "the page was not loaded again");

    // From inside the region that is cut off.
    browser.open(&fixture.console(alone)).await;
    browser.shows("[data-banner=quorum]", "No quorum", SOON).await;
    fixture.shows_health(here, "Cut off", SOON).await;
    fixture.pictures("overview-inside-partition").await;
    fixture.cluster.heal(alone);
    for region in 0..3 {
        fixture.shows_health(region, "Healthy", 2 * SOON).await;
    }
    fixture.no_complaints().await;

    // A store that goes away, and a daemon.
    fixture.cluster.redis[here].kill();
    fixture.shows_health(here, "Store away", SOON).await;
    fixture.browser.shows("[data-banner]", REGIONS[here], SOON).await;
    fixture.cluster.redis[here].up().await;
    fixture.shows_health(here, "Healthy", 2 * SOON).await;
    fixture.go("#/events").await;
    fixture.browser.shows(".events li", &format!("{} has its store again", REGIONS[here]), SOON).await;
    fixture.go("#/").await;
    fixture.browser.run("window.loadedOnce = true", json!([])).await;
    fixture.cluster.daemons[alone].kill();
    fixture.browser.shows("[data-banner=line]", "Connection lost", SOON).await;
    fixture.pictures("overview-lost").await;
    fixture.cluster.daemons[alone].spawn();
    fixture.cluster.daemons[alone].ready().await;
    fixture.browser.shows(".line", "Live", 2 * SOON).await;
    assert_eq!(fixture.browser.run("return window.loadedOnce", json!([])).await, json!(true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_looks_buckets_up_and_changes_things_with_the_token_only() {
    let fixture = Fixture::start().await;
    let browser = &fixture.browser;
    browser.resize(1280, 800).await;
    browser.open(&format!("{}#/buckets", fixture.console(0))).await;
    browser.shows("h1", "Buckets", SOON).await;
    browser.type_into("input[name='key 0']", "42", false).await;
    browser.press("\u{e007}").await; // Enter
    browser.shows("#bucket", "tenant=42", SOON).await;
    for region in REGIONS {
        browser.shows(".bucket-result tbody tr", region, SOON).await;
    }
    // Each region has said what it holds.
    eventually("every region's level is shown", SOON, || async {
        let rows = browser.texts(".bucket-result tbody tr").await;
        let known = rows.iter().filter(|row| row.contains(" of ") && row.contains("/s")).count();
        hold(known == 3, || format!("{rows:?}"))
    })
    .await;
    fixture.pictures("bucket").await;

    fixture.go("#/change").await;
    browser.shows("h1", "Change policies", SOON).await;
    let disabled = "return document.querySelector('.buttons .primary').disabled";
    assert_eq!(browser.run(disabled, json!([])).await, json!(true), "read-only without a token");
    fixture.no_complaints().await;
    browser.click(".tools button", "Allow changes").await;
    browser.type_into("dialog input", "wrong", false).await;
    browser.press("\u{e007}").await;
    browser.shows("dialog .problem", "not the right one", SOON).await;
    let refused = browser.complaints().await;
    assert!(refused.iter().all(|c| c.contains("401")), "{refused:?}");
    browser.type_into("dialog input", TOKEN, true).await;
    browser.press("\u{e007}").await;
    browser.shows(".tools button", "Changes allowed", SOON).await;

    let text = || async {
        let text = browser.run("return document.querySelector('textarea').value", json!([])).await;
        text.as_str().unwrap_or_default().to_owned()
    };
    eventually("the policies in force are in the editor", SOON, || async {
        let text = text().await;
        hold(text.contains("requests"), || text)
    })
    .await;
    let set = "const e = document.querySelector('textarea'); e.value = arguments[0];
        e.dispatchEvent(new Event('input', { bubbles: true }))";
    let good = text().await;
    browser.run(set, json!([good.replace("rate: 40/s", "rate: fourty/s")])).await;
    browser.click("button", "Check").await;
    browser.shows(".faults", "line 5, column", SOON).await;
    let _ = browser.complaints().await; // the 400 that was asked for

    let changed = good.replace("rate: 40/s, burst: 40", "rate: 80/s, burst: 40");
    assert_ne!(changed, good);
    browser.run(set, json!([changed])).await;
    browser.click("button", "Check").await;
    browser.shows(".change", "requests", SOON).await;
    browser.shows(".change .gone", "{ rate: 40/s, burst: 40 }", SOON).await;
    browser.shows(".change .come", "{ rate: 80/s, burst: 40 }", SOON).await;
    browser.shows(".change .come", "40 + 80 T", SOON).await;
    assert_eq!(browser.texts(".change").await.len(), 1, "nothing else changes");
    fixture.pictures("change-diff").await;
    let version = |region: usize| {
        let admin = fixture.cluster.daemons[region].admin();
        async move { Ok::<_, String>(admin.get("/v1/policies").await?.must_have("etag").to_owned()) }
    };
    assert_eq!(version(1).await.expect("policies"), "\"1\"", "a check changes nothing");
    browser.click("button", "Apply version 2").await;
    browser.shows("#outcome", "version 2 is in force", SOON).await;
    eventually("every region goes by the new policies", SOON, || async {
        for (region, name) in REGIONS.iter().enumerate() {
            let version = version(region).await?;
            hold(version == "\"2\"", || format!("{name}: {version}"))?;
        }
        Ok(())
    })
    .await;

    // A bucket is handed out once more, with a reason.
    fixture.go("#/buckets").await;
    browser.shows(".bucket", "tenant=acme", SOON).await;
    browser.click(".bucket", "tenant=acme").await;
    browser.shows(".bucket-result button", "Reset", SOON).await;
    browser.click(".bucket-result button", "Reset").await;
    let filled = browser.run("return document.querySelector('dialog input').value", json!([])).await;
    assert_eq!(filled, json!("acme"), "it knows which bucket");
    browser.type_into("dialog input[name=reason]", "their incident is over", false).await;
    browser.press("\u{e007}").await;
    eventually("the page says that it was done", SOON, || async {
        let said = browser.run("return document.getElementById('said').textContent", json!([])).await;
        let said = said.as_str().unwrap_or_default().to_owned();
        let dialog = browser.texts("dialog").await;
        hold(said.starts_with("The bucket was reset"), || format!("{said}; {dialog:?}"))
    })
    .await;
    fixture.go("#/events").await;
    browser.shows(".events li.warn", "their incident is over", SOON).await;

    fixture.go("#/").await;
    let before = fixture.cluster.agreed_leader(SOON, &[0, 1, 2]).await;
    browser.shows(".region button", "Make it the leader", SOON).await;
    browser.click(".region button", "Make it the leader").await;
    browser.shows("dialog", "is to lead", SOON).await;
    fixture.pictures("dialog").await;
    eventually("another region leads", 3 * SOON, || async {
        // A handover that does not go through in time says so in the dialog, and may be asked for again.
        let ready = "const b = document.querySelector('dialog button[type=submit]'); return b !== null && !b.disabled";
        if browser.run(ready, json!([])).await == json!(true) {
            browser.click("dialog button", "Hand over").await;
        }
        let after = fixture.cluster.daemons[0].leader().await?;
        let dialog = browser.texts("dialog").await;
        hold(after != REGIONS[before], || format!("{after} still leads; {dialog:?}"))
    })
    .await;
    eventually("the dialog is over", SOON, || async {
        let dialog = browser.texts("dialog").await;
        if !dialog.is_empty() {
            browser.click("dialog button", "Cancel").await;
        }
        hold(dialog.is_empty(), || format!("{dialog:?}"))
    })
    .await;
    browser.click(".tools button", "lock").await;
    browser.shows(".tools button", "Allow changes", SOON).await;
    assert!(browser.texts(".region button").await.is_empty(), "read-only again");
    fixture.no_complaints().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_can_be_used_with_a_keyboard_a_screen_reader_and_a_small_screen() {
    let fixture = Fixture::start().await;
    let browser = &fixture.browser;
    browser.open(&fixture.console(0)).await;
    browser.shows("table", "tenant=42", SOON).await;
    for hash in ["#/", "#/policies/requests", "#/buckets", "#/events", "#/change"] {
        fixture.go(hash).await;
        browser.shows("h1", "", SOON).await;
        let heard = browser.accessibility().await;
        for landmark in ["banner", "navigation", "main", "status"] {
            assert!(heard.iter().any(|(role, _)| role == landmark), "{hash}: no {landmark}");
        }
        assert!(heard.iter().any(|(role, name)| role == "heading" && !name.is_empty()), "{hash}: no heading");
        let named = [
            "button",
            "link",
            "textbox",
            "searchbox",
            "combobox",
            "image",
            "img",
            "region",
            "article",
            "table",
        ];
        let nameless: Vec<_> =
            heard.iter().filter(|(role, name)| named.contains(&role.as_str()) && name.is_empty()).collect();
        // A table says its name by the region around it, or by its headers.
        let nameless: Vec<_> = nameless.into_iter().filter(|(role, _)| role != "table").collect();
        assert!(nameless.is_empty(), "{hash}: without a name: {nameless:?}");
        for theme in ["light", "dark"] {
            browser.theme(theme).await;
            let faint = browser.run(CONTRAST, json!([])).await;
            assert_eq!(faint, json!([]), "{hash} in the {theme} theme: text that is hard to read");
        }
        for width in [1280, 400] {
            browser.resize(width, 800).await;
            let overflow =
                browser.run("return document.documentElement.scrollWidth - innerWidth", json!([])).await;
            assert!(
                overflow.as_i64().is_some_and(|o| o <= 0),
                "{hash} at {width}: {overflow} pixels too wide"
            );
        }
    }
    fixture.pictures("change").await;

    // From the first key on: past the head, through the views, to a policy; and the page that draws itself anew leaves the focus
    // where it is.
    browser.open(&fixture.console(0)).await;
    browser.shows("h2", "Regions", SOON).await;
    browser.press("\u{e004}").await; // Tab
    let focus = "return document.activeElement.innerText";
    assert_eq!(browser.run(focus, json!([])).await, json!("Skip to content"));
    let wanted = json!("requests");
    let mut passed = Vec::new();
    for _ in 0..40 {
        browser.press("\u{e004}").await;
        let now = browser.run(focus, json!([])).await;
        if now == wanted {
            break;
        }
        passed.push(now);
    }
    assert_eq!(browser.run(focus, json!([])).await, wanted, "the focus went by: {passed:?}");
    let drawn = "return (window.draws ??= (() => { const o = { n: 0 };
        new MutationObserver(() => o.n++).observe(document.querySelector('main'), { subtree: true, childList: true, characterData: true, attributes: true });
        return o; })()).n";
    let begun = browser.run(drawn, json!([])).await.as_i64().unwrap_or(0);
    eventually("the page is drawn anew", SOON, || async {
        let now = browser.run(drawn, json!([])).await;
        hold(now.as_i64().is_some_and(|n| n > begun + 5), || now.to_string())
    })
    .await;
    assert_eq!(browser.run(focus, json!([])).await, wanted, "the focus stays");
    browser.press("\u{e007}").await;
    browser.shows("h1", "requests", SOON).await;
    fixture.no_complaints().await;
}

/// Text whose contrast with what is behind it is too small (WCAG 2.2, success criterion 1.4.3).
const CONTRAST: &str = r#"
const parse = (text) => {
  const canvas = (window.probe ??= document.createElement("canvas").getContext("2d", { willReadFrequently: true }));
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = text;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = ([r, g, b, a], [x, y, z]) => [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a), 1];
const light = ([r, g, b]) => {
  const part = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
};
const behind = (element) => {
  const layers = [];
  for (let e = element; e; e = e.parentElement) layers.unshift(parse(getComputedStyle(e).backgroundColor));
  return layers.reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
};
const faint = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const element = node.parentElement;
  if (!node.data.trim() || element.closest("[aria-hidden=true], .unseen, .skip, [role=img], button:disabled, noscript")) continue;
  if (element.getClientRects().length === 0) continue;
  const style = getComputedStyle(element);
  const back = behind(element);
  const front = over(parse(style.color), back);
  const [high, low] = [light(front), light(back)].sort((a, b) => b - a);
  const ratio = (high + 0.05) / (low + 0.05);
  if (ratio < 4.5) faint.push(`${node.data.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
}
return faint;
"#;

/// The same for a terminal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_and_status_show_the_cluster_and_a_partition_as_lines() {
    let cluster = Fixture::start_without_browser().await;
    let history = History::default();
    let ask = Ask::new("logins", "auth", &[("account", "mallory\u{1b}[31m")]);
    let _load = Steady::start(&ask, &cluster.apis(), &[6, 6, 6], &history);
    let leader = cluster.agreed_leader(SOON, &[0, 1, 2]).await;
    let (here, alone) = ((leader + 1) % 3, (leader + 2) % 3);
    let admin = cluster.daemons[here].admin().url();
    eventually("top shows the bucket with all regions in it", SOON, || async {
        let top = quorate(&["top", "--json", "--count", "1", "--admin", &admin]).await;
        let top: Value = serde_json::from_slice(&top.stdout).map_err(|e| e.to_string())?;
        let hot = &top["hottest"][0];
        let regions = hot["regions"].as_object().map_or(0, serde_json::Map::len);
        let all = hot["policy"] == "logins" && regions == 3;
        hold(all && hot["admitted"].as_u64() > Some(3_000) && hot["denied"].as_u64() > Some(6_000), || {
            top.to_string()
        })
    })
    .await;
    cluster.cut_off(alone);
    eventually("top says that a region is cut off", SOON, || async {
        let top = quorate(&["top", "--count", "2", "--rows", "1", "--admin", &admin]).await;
        assert_eq!(top.status.code(), Some(0));
        let text = String::from_utf8(top.stdout).expect("text");
        assert!(
            !text.contains('\u{1b}'),
            "nothing moves a cursor here, callers' text least of all: {text:?}"
        );
        hold(text.matches(&format!("CUT OFF: {}", REGIONS[alone])).count() == 2, || text.clone())?;
        hold(text.contains("account=mallory"), || text)
    })
    .await;
    eventually("status says so, too", SOON, || async {
        let status = quorate(&["status", "--admin", &admin]).await;
        let text = String::from_utf8(status.stdout).expect("text");
        let peer = text.lines().find(|line| line.starts_with("peer") && line.contains(REGIONS[alone]));
        let peer = peer.unwrap_or_default();
        hold(peer.contains("UNREACHABLE") && peer.contains("last heard"), || text.clone())?;
        hold(text.contains("(when last heard)"), || text)
    })
    .await;
    let nobody = quorate(&["top", "--count", "1", "--admin", "127.0.0.1:1"]).await;
    assert_eq!(nobody.status.code(), Some(2));
}

/// Server-sent events as they are on the wire.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn its_events_come_at_once_and_a_reader_that_comes_back_misses_none() {
    let fixture = Fixture::start_without_browser().await;
    let (cluster, leader) = (&fixture, fixture.agreed_leader(SOON, &[0, 1, 2]).await);
    let here = (leader + 1) % 3;
    let url = format!("{}/v1/events", cluster.daemons[here].admin().url());
    let first = read_events(&url, None, |all| all.contains("event: patch")).await;
    assert!(first.contains("event: state\nid: "), "{first}");
    let id = first.lines().rev().find_map(|line| line.strip_prefix("id: ")).expect("an id").to_owned();
    cluster.cut_off((leader + 2) % 3);
    let back = read_events(&url, Some(&id), |all| all.contains("does not answer")).await;
    assert!(!back.contains("event: state"), "it goes on where it was: {back}");
    let event =
        back.lines().find(|line| line.contains("does not answer")).and_then(|l| l.strip_prefix("data: "));
    let event: Value = serde_json::from_str(event.expect("data")).expect("JSON");
    assert_eq!((&event["kind"], &event["level"]), (&json!("peer"), &json!("warn")));
    assert_eq!(event["region"], json!(REGIONS[(leader + 2) % 3]));
}

impl Fixture {
    async fn start_without_browser() -> Cluster {
        let plan = Plan { policies: POLICIES.to_owned(), rtt: Duration::from_millis(20), ..Plan::default() };
        Cluster::start(plan).await
    }
}

/// Reads a stream of events until `enough`.
async fn read_events(url: &str, last: Option<&str>, enough: impl Fn(&str) -> bool) -> String {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().no_proxy().build().expect("an HTTP client");
    let mut request = client.get(url);
    if let Some(id) = last {
        request = request.header("last-event-id", id);
    }
    let mut answer = request.send().await.expect("the stream opens");
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    let mut all = String::new();
    let read = async {
        while !enough(&all) {
            let chunk = answer.chunk().await.expect("the stream goes on").expect("the stream goes on");
            all.push_str(&String::from_utf8_lossy(&chunk));
        }
    };
    let in_time = tokio::time::timeout(SOON, read).await.is_ok();
    assert!(in_time, "not within {SOON:?}: {all}");
    all
}
