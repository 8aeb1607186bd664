//! What needs the program itself: it runs, as the agent would run it, against a simulated GPU.

mod gpu;
mod simulation;
