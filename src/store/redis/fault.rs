//! What an error of the server or of the connection means for the call that met it.

use crate::store::StoreError;
use fred::error::{Error, ErrorKind};

/// Why a call has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The server refused it, and has done nothing; the connection is good.
    Refused(String),
    /// The server refused it because it is not (or no longer) a primary that may be used; it has done nothing.
    NotPrimary(String),
    /// Another session holds the buckets, or they are gone; nothing has been done.
    Fenced,
    /// The server's clock was outside the call's window (it came late, or the clock has stepped); nothing has been done.
    Clock,
    /// The connection broke, or the answer made no sense: it may have been done.
    Unknown(String),
}

impl Fault {
    /// What the caller is told.
    pub(super) fn error(&self) -> StoreError {
        match self {
            Self::Refused(_) | Self::NotPrimary(_) | Self::Clock => StoreError::Unavailable,
            Self::Fenced => StoreError::Fenced,
            Self::Unknown(_) => StoreError::Unknown,
        }
    }

    /// Is this connection of no more use?
    pub(super) fn ends_connection(&self) -> bool {
        matches!(self, Self::NotPrimary(_) | Self::Fenced | Self::Unknown(_))
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(why) => write!(f, "Redis refuses: {why}"),
            Self::NotPrimary(why) => write!(f, "this Redis is not a primary that is ready: {why}"),
            Self::Fenced => f.write_str("another daemon has taken over (one region is one daemon, and has a Redis of its own), or the data is gone"),
            Self::Clock => f.write_str("Redis' clock is not where it should be"),
            Self::Unknown(why) => write!(f, "the connection to Redis failed: {why}"),
        }
    }
}

/// Sorts an error. Error replies begin with a word in capitals (RESP, "Simple errors"); what fred says itself does not.
pub(super) fn classify(error: &Error) -> Fault {
    let details = error.details();
    let word = details.split([' ', ':']).next().unwrap_or_default();
    let is_reply = !word.is_empty() && word.bytes().all(|b| b.is_ascii_uppercase());
    let local = matches!(
        error.kind(),
        ErrorKind::IO | ErrorKind::Canceled | ErrorKind::Timeout | ErrorKind::Routing | ErrorKind::Protocol
    );
    if local || !is_reply {
        return Fault::Unknown(plain(details).to_owned());
    }
    match word {
        // (MOVED, ASK: its slot is another server's, or on its way there.)
        "READONLY" | "LOADING" | "MASTERDOWN" | "MOVED" | "ASK" => Fault::NotPrimary(details.to_owned()),
        _ => Fault::Refused(details.to_owned()),
    }
}

/// The message of an error of the system, which fred tells as `Os { code: …, message: "…" }`, or of TLS (`Custom { kind: …, error: … }`).
fn plain(details: &str) -> &str {
    let custom = details.strip_prefix("Custom {").and_then(|custom| custom.split_once("error: "));
    if let Some(error) = custom.and_then(|(_, error)| error.strip_suffix(" }")) {
        return error;
    }
    let message = details.strip_prefix("Os {").and_then(|os| os.split_once("message: \""));
    message.and_then(|(_, rest)| rest.split_once('"')).map_or(details, |(message, _)| message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_system_are_told_plainly() {
        let refused = "Os { code: 111, kind: ConnectionRefused, message: \"Connection refused\" }";
        assert_eq!(plain(refused), "Connection refused");
        assert_eq!(plain("Connection closed."), "Connection closed.");
        assert_eq!(plain("Os { odd"), "Os { odd");
        let alert = "Custom { kind: InvalidData, error: AlertReceived(UnknownCA) }";
        assert_eq!(plain(alert), "AlertReceived(UnknownCA)");
    }

    #[test]
    fn only_an_error_reply_is_proof_that_nothing_happened() {
        let fault = |kind, details: &'static str| classify(&Error::new(kind, details));
        assert!(matches!(fault(ErrorKind::Unknown, "READONLY You can't write"), Fault::NotPrimary(_)));
        assert!(matches!(fault(ErrorKind::Unknown, "OOM command not allowed"), Fault::Refused(_)));
        assert!(matches!(fault(ErrorKind::Auth, "NOAUTH Authentication required."), Fault::Refused(_)));
        assert_eq!(fault(ErrorKind::IO, "Connection closed.").error(), StoreError::Unknown);
        assert_eq!(fault(ErrorKind::Canceled, "Canceled.").error(), StoreError::Unknown);
        assert_eq!(
            fault(ErrorKind::Unknown, "Failed to send command to router.").error(),
            StoreError::Unknown
        );
        assert_eq!(fault(ErrorKind::Unknown, "").error(), StoreError::Unknown);
    }
}
