//! A seccomp filter: a program of the classic BPF machine, which sees nothing but a call's number,
//! architecture, place and arguments (`Documentation/userspace-api/seccomp_filter.rst`,
//! `Documentation/networking/filter.rst`).

use super::word::Word;

/// A call of which it is asked what becomes of it. Its place and its other arguments may be anything.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) number: u32,
    pub(super) architecture: u32,
    /// Bits that are set in the lower half of its first argument; all others may be anything.
    pub(super) first: u32,
}

/// A filter's instructions.
#[derive(Clone, Debug)]
pub(super) struct Program(Vec<Instruction>);

/// `struct sock_filter`.
#[derive(Clone, Copy, Debug)]
struct Instruction {
    code: u16,
    if_true: u8,
    if_false: u8,
    value: u32,
}

/// Its size in bytes.
const INSTRUCTION: usize = 8;

/// `BPF_MAXINSNS`. The kernel takes no more; CRIU, which cuts their number to 16 bits, would install another
/// program, and then others than the next.
const INSTRUCTIONS_MAX: usize = 4096;

/// Size of `struct seccomp_data`.
const DATA: u32 = 64;

/// A filter may go as many ways for one call: those that look at arguments have few.
const STEPS_MAX: usize = 1 << 16;

/// `SECCOMP_RET_USER_NOTIF`: all actions from here on let the call through, or let somebody do so. Each of
/// the others is harder, and so is what the kernel does not know (`seccomp_run_filters`).
const ASKS: i32 = 0x7fc0_0000;
/// `SECCOMP_RET_ACTION_FULL`.
const ACTION: u32 = 0xffff_0000;

/// What the machine holds.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    at: usize,
    a: Word,
    x: Word,
    memory: [Word; 16],
}

/// What comes of an instruction.
enum Step {
    On,
    Returned(Word),
    /// By so many instructions, or by so many.
    Either(usize, usize),
    /// No program that the kernel takes has this.
    Wrong,
}

impl Program {
    /// Returns nothing for what is no program that CRIU and the kernel take as it is.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (instructions, rest) = bytes.as_chunks::<INSTRUCTION>();
        let is_whole = rest.is_empty() && (1..=INSTRUCTIONS_MAX).contains(&instructions.len());
        let instructions = instructions.iter().map(|&[c, d, if_true, if_false, w, x, y, z]| {
            let (code, value) = (u16::from_ne_bytes([c, d]), u32::from_ne_bytes([w, x, y, z]));
            Instruction { code, if_true, if_false, value }
        });
        is_whole.then(|| Self(instructions.collect()))
    }

    /// Whether it refuses a call, whatever is not known of that.
    pub(super) fn refuses(&self, call: Call) -> bool {
        let mut ways = vec![State::default()];
        let mut steps = 0;
        while let Some(mut state) = ways.pop() {
            loop {
                steps += 1;
                let Some(instruction) = self.0.get(state.at).filter(|_| steps <= STEPS_MAX) else {
                    return false;
                };
                state.at += 1;
                match state.step(*instruction, call) {
                    Step::On => {}
                    Step::Returned(answer) if answer.exact().is_some_and(is_hard) => break,
                    Step::Returned(_) | Step::Wrong => return false,
                    Step::Either(there, here) => {
                        if there != here {
                            ways.push(State { at: state.at.saturating_add(there), ..state });
                        }
                        state.at = state.at.saturating_add(here);
                    }
                }
            }
        }
        true
    }
}

const fn is_hard(answer: u32) -> bool {
    (answer & ACTION).cast_signed() < ASKS
}

impl State {
    fn step(&mut self, instruction: Instruction, call: Call) -> Step {
        let Instruction { code, value, .. } = instruction;
        match code {
            // BPF_LD and BPF_LDX: a word of the data, a number, a word of its own, the data's length.
            0x20 => match call.load(value) {
                Some(loaded) => self.a = loaded,
                None => return Step::Wrong,
            },
            0x00 => self.a = Word::of(value),
            0x01 => self.x = Word::of(value),
            0x80 => self.a = Word::of(DATA),
            0x81 => self.x = Word::of(DATA),
            0x60 | 0x61 | 0x02 | 0x03 => {
                let word = usize::try_from(value).ok().and_then(|at| self.memory.get_mut(at));
                let Some(word) = word else { return Step::Wrong };
                match code {
                    0x60 => self.a = *word,
                    0x61 => self.x = *word,
                    0x02 => *word = self.a,
                    _ => *word = self.x,
                }
            }
            // BPF_RET
            0x06 => return Step::Returned(Word::of(value)),
            0x16 => return Step::Returned(self.a),
            // BPF_MISC
            0x07 => self.x = self.a,
            0x87 => self.a = self.x,
            // BPF_JMP | BPF_JA
            0x05 => {
                let by = usize::try_from(value).unwrap_or(usize::MAX);
                return Step::Either(by, by);
            }
            _ if code & 0x07 == 0x05 => return self.jump(instruction),
            _ if code & 0x07 == 0x04 => return self.compute(code, value),
            _ => return Step::Wrong,
        }
        Step::On
    }

    /// `BPF_JMP`.
    fn jump(self, instruction: Instruction) -> Step {
        let Instruction { code, value, .. } = instruction;
        let operand = if code & 0x08 == 0 { Word::of(value) } else { self.x };
        let (there, here) = (usize::from(instruction.if_true), usize::from(instruction.if_false));
        let holds = match code & !0x0f {
            0x10 => self.a.equals(operand),
            0x20 => self.a.is_more(operand),
            0x30 => operand.is_more(self.a).map(|is_less| !is_less),
            0x40 => self.a.shares(operand),
            _ => return Step::Wrong,
        };
        let by = holds.map(|holds| if holds { there } else { here });
        by.map_or(Step::Either(there, here), |by| Step::Either(by, by))
    }

    /// `BPF_ALU`.
    fn compute(&mut self, code: u16, value: u32) -> Step {
        let operand = if code & 0x08 == 0 { Word::of(value) } else { self.x };
        let exactly = |result: fn(u32, u32) -> u32| {
            let known = self.a.exact().zip(operand.exact());
            known.map_or(Word::default(), |(a, with)| Word::of(result(a, with)))
        };
        self.a = match code & !0x0f {
            0x00 => exactly(u32::wrapping_add),
            0x10 => exactly(u32::wrapping_sub),
            0x20 => exactly(u32::wrapping_mul),
            // A program that divides by nothing ends there, with what kills.
            0x30 if operand.exact() == Some(0) => return Step::Returned(Word::of(0)),
            0x30 => exactly(|a, with| a.checked_div(with).unwrap_or_default()),
            0x40 => self.a.or(operand),
            0x50 => self.a.and(operand),
            0x60 => exactly(u32::wrapping_shl),
            0x70 => exactly(u32::wrapping_shr),
            0x80 => exactly(|a, _| a.wrapping_neg()),
            0xa0 => exactly(|a, with| a ^ with),
            _ => return Step::Wrong,
        };
        Step::On
    }
}

impl Call {
    /// Returns a word of `struct seccomp_data`, if there is one.
    fn load(self, offset: u32) -> Option<Word> {
        match offset {
            0 => Some(Word::of(self.number)),
            4 => Some(Word::of(self.architecture)),
            16 => Some(Word::with(self.first)),
            _ if offset < DATA && offset.is_multiple_of(4) => Some(Word::default()),
            _ => None,
        }
    }
}
