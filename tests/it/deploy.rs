//! Everything under `deploy/`, checked by the programs that it is for, as far as these run here: systemd, promtool and
//! Prometheus, Docker Compose, kubectl, hadolint, openssl. And that it is about the Quorate of this repository: its ports, keys, metrics.

mod compose;
mod kubernetes;
mod prometheus;
mod systemd;
