//! Any text gives a config that prints and reads back to itself, or named problems.
#![no_main]

use kvcachepool_protocol::config::Config;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    for managed in [false, true] {
        match Config::parse(text, managed) {
            Ok((config, unknown)) => {
                assert!(managed || config.managed || unknown.is_empty());
                let again =
                    Config::parse(&config.to_yaml(), false).expect("what was printed can be read");
                assert_eq!(again.0, config);
                assert!(config.changes(&again.0).live.is_empty());
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
});
