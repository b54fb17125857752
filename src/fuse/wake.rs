//! Makes wake-ups cheap while requests follow each other (`-o wake=`).

use crate::error::{Attempt, Error, Kind, Result};
use crate::fuse::latency::LatencyHolder;
use crate::fuse::spin::Spinner;
use crate::sys::cpu_latency;

/// How a mount makes wake-ups cheap while requests follow each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Wake {
    /// As `Latency` where this process may open the device, else as `Off`.
    #[default]
    Auto,
    /// Not at all.
    Off,
    /// Holds `/dev/cpu_dma_latency` at 0, which only root may do.
    Latency,
    /// A thread of lowest priority spins on one CPU.
    Spin,
}

/// Keeps wake-ups cheap. Ends when it is dropped.
pub(super) enum Waker {
    Latency(LatencyHolder),
    Spin(Spinner),
}

impl Waker {
    /// Starts what `wake` asks for. `None` where nothing is to be done.
    ///
    /// # Errors
    /// If the device cannot be opened although `wake` asks for it, or no thread can be started.
    pub(super) fn start(wake: Wake) -> Result<Option<Waker>> {
        let latency = || LatencyHolder::start().map(Waker::Latency);
        match wake {
            Wake::Off => Ok(None),
            Wake::Spin => {
                let spinner = Spinner::start().attempt(|| "start the spinning thread")?;
                Ok(Some(Waker::Spin(spinner)))
            }
            Wake::Auto => {
                Ok(latency().inspect_err(|error| log::debug!("wake=auto is off: {error}")).ok())
            }
            Wake::Latency => latency().map(Some).map_err(|error| {
                let attempt = format!("open '{}' for 'wake=latency'", cpu_latency::DEVICE);
                Error::new(Kind::CannotMount, attempt, error.to_string())
                    .hint("only root may do that; 'wake=auto' does without where it is not allowed")
            }),
        }
    }

    /// Counts a request.
    pub(super) fn note_request(&self) {
        match self {
            Waker::Latency(holder) => holder.note_request(),
            Waker::Spin(spinner) => spinner.note_request(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::testing::run_as_ordinary_user;

    const USER: &str = "JAILFS_TEST_WAKE_USER";

    #[test]
    fn without_permission_auto_is_off_and_latency_is_an_error() {
        run_as_ordinary_user("fuse::wake::tests::ordinary_user", (USER, "1".as_ref()));
    }

    #[test]
    fn ordinary_user() {
        if std::env::var_os(USER).is_none() {
            return;
        }
        assert!(Waker::start(Wake::Auto).unwrap().is_none());
        let error = Waker::start(Wake::Latency).err().unwrap();
        assert!(error.kind == Kind::CannotMount && error.hint.is_some(), "{error}");
        assert!(error.to_string().contains(cpu_latency::DEVICE), "{error}");
        assert!(Waker::start(Wake::Off).unwrap().is_none());
        assert!(Waker::start(Wake::Spin).unwrap().is_some());
    }
}
