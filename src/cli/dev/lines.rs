//! The lines between the regions of `quorate dev`, and a listener on loopback that cuts and joins them.

use crate::quota::policy::RegionName;
use crate::wan::Link;
use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Every line, in each direction, and which two regions it joins.
#[derive(Debug, Default)]
pub(super) struct Lines(Vec<Line>);

#[derive(Debug)]
struct Line {
    between: [RegionName; 2],
    link: Link,
}

impl Lines {
    /// Lays a line by which `from` reaches `to`, which listens at `target`; `delay` each way. Returns where it begins.
    pub(super) async fn lay(
        &mut self,
        from: RegionName,
        to: RegionName,
        target: SocketAddr,
        delay: Duration,
    ) -> std::io::Result<SocketAddr> {
        let link = Link::start(target, delay).await?;
        let begins = link.addr();
        self.0.push(Line { between: [from, to], link });
        Ok(begins)
    }

    /// Serves `POST /cut/REGION` and `POST /join/REGION` there until the listener fails.
    pub(super) async fn serve(self: Arc<Self>, listener: tokio::net::TcpListener) -> std::io::Result<()> {
        let routes = Router::new()
            .route("/cut/{region}", post(cut))
            .route("/join/{region}", post(join))
            .with_state(self);
        axum::serve(listener, routes).await
    }

    fn each(&self, region: &str, change: impl Fn(&Link)) -> Result<(), (StatusCode, String)> {
        let of_it = |line: &&Line| line.between.iter().any(|name| **name == *region);
        let mut found = 0;
        for line in self.0.iter().filter(of_it) {
            change(&line.link);
            found += 1;
        }
        let none = || (StatusCode::NOT_FOUND, format!("`{region}` has no line to another region\n"));
        if found == 0 { Err(none()) } else { Ok(()) }
    }
}

type Answer = Result<String, (StatusCode, String)>;

async fn cut(State(lines): State<Arc<Lines>>, Path(region): Path<String>) -> Answer {
    lines.each(&region, Link::cut)?;
    Ok(format!("{region} is cut off\n"))
}

async fn join(State(lines): State<Arc<Lines>>, Path(region): Path<String>) -> Answer {
    lines.each(&region, Link::heal)?;
    Ok(format!("{region} reaches the others again\n"))
}
