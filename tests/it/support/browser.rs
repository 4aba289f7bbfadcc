//! A real Chromium, driven over WebDriver (W3C, plain HTTP and JSON) by its own driver.

use super::process::Process;
use super::{eventually, free_address, hold};
use serde_json::{Value, json};
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// The driver, and a browser that starts for the first time, may take this long on a busy machine.
const START_WITHIN: Duration = Duration::from_secs(60);
/// The name under which WebDriver gives out elements (W3C WebDriver, section 12).
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// A browser with one page. Ends when dropped.
pub struct Browser {
    http: reqwest::Client,
    session: String,
    /// It and all browsers that it starts are one process group.
    driver: Process,
    /// Dropped last: the browser's profile is in it.
    _folder: TempDir,
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The browser would outlive a driver that is killed.
        self.driver.kill_group();
    }
}

impl Browser {
    /// Starts one, without a screen.
    pub async fn start() -> Self {
        let folder = tempfile::Builder::new().prefix("quorate-chromium-").tempdir().expect("a folder");
        let address = free_address();
        let mut command = Command::new("chromedriver");
        command.arg(format!("--port={}", address.port())).process_group(0);
        let driver = Process::start("chromedriver", folder.path(), &mut command);
        let http = reqwest::Client::builder().no_proxy().http1_only().tls_backend_preconfigured(no_tls());
        let http = http.timeout(START_WITHIN).build().expect("an HTTP client");
        let base = format!("http://{address}");
        eventually("chromedriver answers", START_WITHIN, || async {
            let answer = http.get(format!("{base}/status")).send().await;
            answer.map(drop).map_err(|e| e.to_string())
        })
        .await;
        let profile = folder.path().join("profile");
        let mut arguments = vec![format!("--user-data-dir={}", profile.display())];
        arguments.extend(
            [
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--hide-scrollbars",
            ]
            .map(str::to_owned),
        );
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }}});
        let mut browser = Self { http, session: base, driver, _folder: folder };
        let session = browser.post("/session", &wanted).await;
        let id = session["sessionId"].as_str().expect("a session");
        browser.session = format!("{}/session/{id}", browser.session);
        browser
    }

    /// Goes to a page, and waits until it is loaded.
    pub async fn open(&self, url: &str) {
        self.post("/url", &json!({"url": url})).await;
    }

    /// Runs a script's body in the page; `arguments` are its arguments.
    pub async fn run(&self, script: &str, arguments: Value) -> Value {
        self.post("/execute/sync", &json!({"script": script, "args": arguments})).await
    }

    /// The text of all elements that a CSS selector finds, in order.
    pub async fn texts(&self, css: &str) -> Vec<String> {
        let script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)";
        let texts = self.run(script, json!([css])).await;
        texts.as_array().into_iter().flatten().map(|t| t.as_str().unwrap_or_default().to_owned()).collect()
    }

    /// Waits until some element that `css` finds has this text in it.
    pub async fn shows(&self, css: &str, text: &str, within: Duration) {
        eventually(&format!("`{css}` shows `{text}`"), within, || async {
            let texts = self.texts(css).await;
            hold(texts.iter().any(|t| t.contains(text)), || format!("{texts:?}"))
        })
        .await;
    }

    /// Clicks as a mouse does: on an element that is there, is visible and is not covered. With `text`: the one with that text.
    pub async fn click(&self, css: &str, text: &str) {
        let script = "return [...document.querySelectorAll(arguments[0])]
            .find((e) => e.innerText.includes(arguments[1])) ?? null";
        let element = self.run(script, json!([css, text])).await;
        let id = element[ELEMENT].as_str().unwrap_or_else(|| panic!("no `{css}` with `{text}`"));
        self.post(&format!("/element/{id}/click"), &json!({})).await;
    }

    /// Types into a field, after what is there; `clear`: instead of it.
    pub async fn type_into(&self, css: &str, text: &str, clear: bool) {
        let script = "return document.querySelector(arguments[0])";
        let element = self.run(script, json!([css])).await;
        let id = element[ELEMENT].as_str().unwrap_or_else(|| panic!("no `{css}`"));
        if clear {
            self.post(&format!("/element/{id}/clear"), &json!({})).await;
        }
        self.post(&format!("/element/{id}/value"), &json!({"text": text})).await;
    }

    /// Presses keys, wherever the focus is.
    pub async fn press(&self, keys: &str) {
        let actions: Vec<Value> = keys
            .chars()
            .flat_map(|key| ["keyDown", "keyUp"].map(|kind| json!({"type": kind, "value": key.to_string()})))
            .collect();
        let all = json!({"actions": [{"type": "key", "id": "keyboard", "actions": actions}]});
        self.post("/actions", &all).await;
    }

    /// The window's inner size, in CSS pixels.
    pub async fn resize(&self, width: u32, height: u32) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.devtools("Emulation.setDeviceMetricsOverride", size).await;
    }

    /// What the system wishes: `light` or `dark`.
    pub async fn theme(&self, theme: &str) {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": theme}]});
        self.devtools("Emulation.setEmulatedMedia", features).await;
    }

    /// The accessibility tree, as screen readers get it: role and name of each node that they do not skip.
    pub async fn accessibility(&self) -> Vec<(String, String)> {
        let tree = self.devtools("Accessibility.getFullAXTree", json!({})).await;
        let nodes = tree["nodes"].as_array().expect("nodes");
        let heard = nodes.iter().filter(|node| node["ignored"] != json!(true));
        let text = |node: &Value, field: &str| node[field]["value"].as_str().unwrap_or_default().to_owned();
        heard.map(|node| (text(node, "role"), text(node, "name"))).collect()
    }

    /// What the page and the browser complained about since the last call.
    pub async fn complaints(&self) -> Vec<String> {
        let log = self.post("/se/log", &json!({"type": "browser"})).await;
        let severe = log.as_array().into_iter().flatten();
        let severe = severe.filter(|entry| ["SEVERE", "WARNING"].iter().any(|l| entry["level"] == json!(l)));
        severe.map(|entry| entry["message"].to_string()).collect()
    }

    /// The whole page as a PNG, if `CONSOLE_SHOTS` names a folder for it.
    pub async fn picture(&self, name: &str) {
        let Some(folder) = std::env::var_os("CONSOLE_SHOTS") else { return };
        self.run("scrollTo(0, 0)", json!([])).await;
        let script = "return [innerWidth, Math.min(document.documentElement.scrollHeight, 3000)]";
        let size = self.run(script, json!([])).await;
        let clip = json!({"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1});
        let shot = json!({"format": "png", "captureBeyondViewport": true, "clip": clip});
        let shot = self.devtools("Page.captureScreenshot", shot).await;
        let png = base64(shot["data"].as_str().expect("a picture"));
        let file = std::path::Path::new(&folder).join(format!("{name}.png"));
        std::fs::write(&file, png).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    }

    async fn devtools(&self, command: &str, parameters: Value) -> Value {
        self.post("/goog/cdp/execute", &json!({"cmd": command, "params": parameters})).await
    }

    async fn post(&self, path: &str, body: &Value) -> Value {
        let url = format!("{}{path}", self.session);
        let request = self.http.post(&url).header("content-type", "application/json");
        let answer = request.body(body.to_string()).send().await.unwrap_or_else(|e| panic!("{url}: {e:?}"));
        let ok = answer.status().is_success();
        let text = answer.text().await.unwrap_or_else(|e| panic!("{url}: {e:?}"));
        let mut answer: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{url}: {e}: {text}"));
        assert!(ok, "{url} {body}: {}", answer["value"]["message"]);
        answer["value"].take()
    }
}

/// Traffic to the driver stays on loopback, in the clear.
fn no_tls() -> rustls::ClientConfig {
    let _ = rustls::crypto::ring::default_provider().install_default();
    rustls::ClientConfig::builder()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth()
}

/// RFC 4648, section 4.
fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = text.bytes().filter_map(|byte| DIGITS.iter().position(|digit| *digit == byte));
    let (mut bytes, mut bits, mut have) = (Vec::new(), 0_usize, 0);
    for digit in digits {
        (bits, have) = (bits << 6 | digit, have + 6);
        if have >= 8 {
            have -= 8;
            bytes.push((bits >> have & 0xff) as u8);
        }
    }
    bytes
}
