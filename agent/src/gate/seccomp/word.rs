//! A word of which some bits are known.

/// 32 bits. Of those that are not known, none is set in `bits`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Word {
    bits: u32,
    known: u32,
}

impl Word {
    /// One of which all is known.
    pub(super) const fn of(bits: u32) -> Self {
        Self { bits, known: u32::MAX }
    }

    /// One of which it is known that these are set.
    pub(super) const fn with(bits: u32) -> Self {
        Self { bits, known: bits }
    }

    pub(super) fn exact(self) -> Option<u32> {
        (self.known == u32::MAX).then_some(self.bits)
    }

    pub(super) const fn and(self, other: Self) -> Self {
        let (clear, their) = (self.known & !self.bits, other.known & !other.bits);
        Self { bits: self.bits & other.bits, known: self.known & other.known | clear | their }
    }

    pub(super) const fn or(self, other: Self) -> Self {
        let bits = self.bits | other.bits;
        Self { bits, known: self.known & other.known | bits }
    }

    /// Whether both are the same, as far as that is known.
    pub(super) fn equals(self, other: Self) -> Option<bool> {
        let differ = (self.bits ^ other.bits) & self.known & other.known != 0;
        let is_known = differ || self.known & other.known == u32::MAX;
        is_known.then_some(!differ)
    }

    /// Whether it is more than another.
    pub(super) fn is_more(self, other: Self) -> Option<bool> {
        if self.bits > other.most() {
            return Some(true);
        }
        (self.most() <= other.bits).then_some(false)
    }

    /// Whether they have a bit in common.
    pub(super) fn shares(self, other: Self) -> Option<bool> {
        let both = self.and(other);
        if both.bits != 0 { Some(true) } else { (both.known == u32::MAX).then_some(false) }
    }

    /// Returns what it is at most.
    const fn most(self) -> u32 {
        self.bits | !self.known
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever the unknown bits are, what is said holds.
        #[test]
        fn what_is_known_is_so(
            one in any::<u32>(), known in any::<u32>(), other in any::<u32>(), their in any::<u32>(),
        ) {
            let (a, b) = (Word { bits: one & known, known }, Word { bits: other & their, known: their });
            let fits = |word: Word, value: u32| word.bits == value & word.known;
            prop_assert!(fits(a.and(b), one & other) && fits(a.or(b), one | other));
            prop_assert!(a.equals(b).is_none_or(|is| is == (one == other)));
            prop_assert!(a.is_more(b).is_none_or(|is| is == (one > other)));
            prop_assert!(a.shares(b).is_none_or(|is| is == (one & other != 0)));
            let (a, b) = (Word::of(one), Word::of(other));
            prop_assert_eq!(a.is_more(b), Some(one > other));
            prop_assert_eq!(a.shares(b), Some(one & other != 0));
        }
    }
}
