#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kybernate_agent::fuzz::gate(bytes));
