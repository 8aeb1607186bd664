//! Timers, events and signals that one epoll tells of.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::Failure;
use super::sys;

/// What the timers wait, in milliseconds: longer than the pause between two ticks, so that a checkpoint
/// often meets somebody who waits for them.
const EVERY: std::ffi::c_long = 75;
/// All of them must have been heard of in this time.
const LIMIT: Duration = Duration::from_secs(10);
/// `sizeof(struct signalfd_siginfo)`.
const SIGNAL_BYTES: usize = 128;

/// What is waited for in each tick.
const EVENT: u64 = 0x1111_0000_0000_0001;
const TIMER: u64 = 0x2222_0000_0000_0002;
const SIGNAL: u64 = 0x3333_0000_0000_0003;

pub(super) struct Events {
    poller: OwnedFd,
    event: File,
    timer: File,
    signals: File,
}

/// Has the signals wait until they are read.
pub(super) fn block_signals() -> io::Result<()> {
    sys::block(&sys::signals(&[sys::SIGALRM, sys::SIGTIMER]))
}

impl Events {
    pub(super) fn new() -> io::Result<Self> {
        let signals = sys::signals(&[sys::SIGALRM, sys::SIGTIMER]);
        let new = Self {
            poller: sys::poller()?,
            event: sys::event_file()?.into(),
            timer: sys::timer_file()?.into(),
            signals: sys::signal_file(&signals)?.into(),
        };
        let epoll = new.poller.as_raw_fd();
        for (file, name) in [(&new.event, EVENT), (&new.timer, TIMER), (&new.signals, SIGNAL)] {
            sys::watch(epoll, file.as_raw_fd(), name)?;
        }
        sys::expire(new.timer.as_raw_fd(), EVERY)?;
        sys::alarm(EVERY)?;
        sys::timer(EVERY, sys::SIGTIMER)?;
        Ok(new)
    }

    /// Waits until everything has been heard of.
    pub(super) fn tick(&mut self, count: u64) -> Result<(), Failure> {
        self.event.write_all(&count.to_ne_bytes())?;
        let (mut event, mut timer, mut alarm, mut posix) = (false, false, false, false);
        let begun = Instant::now();
        while !(event && timer && alarm && posix) {
            if begun.elapsed() > LIMIT {
                let text = format!("heard: event {event}, timerfd {timer}, alarm {alarm}, ");
                return Err(format!("{text}timer of POSIX {posix}").into());
            }
            for name in sys::poll(self.poller.as_raw_fd(), 1000)? {
                let mut bytes = [0; SIGNAL_BYTES];
                match name {
                    EVENT => {
                        self.event.read_exact(&mut bytes[..8])?;
                        event = bytes[..8] == count.to_ne_bytes();
                    }
                    TIMER => {
                        self.timer.read_exact(&mut bytes[..8])?;
                        sys::expire(self.timer.as_raw_fd(), EVERY)?;
                        timer = true;
                    }
                    SIGNAL => {
                        self.signals.read_exact(&mut bytes)?;
                        let signal = i32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                        alarm |= signal == sys::SIGALRM;
                        posix |= signal == sys::SIGTIMER;
                    }
                    other => return Err(format!("epoll tells of {other:x}").into()),
                }
            }
        }
        Ok(())
    }
}
