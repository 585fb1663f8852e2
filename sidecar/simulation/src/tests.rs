use super::*;

/// Seeds of one run. More of them: the example `simulate`.
const HISTORIES: u64 = 20_000;
/// Within so many histories every mistake shows.
const UNTIL_SEEN: u64 = 2_000;

#[test]
fn every_rule_holds_in_many_histories_and_every_fault_happens() {
    let summary = run_many(1, HISTORIES, threads(), 1, Wrong::NOTHING, &|p| p);
    let counts = summary.counts;
    for (name, count) in counts.list() {
        println!("{name:28} {count}");
    }
    println!("{} histories, {} events", counts.histories, counts.events);
    if let Some((seed, violation)) = summary.broken.first() {
        guarded(*seed, Wrong::NOTHING, &|p| p, true);
        panic!(
            "seed {seed}: {violation}\n\
             cargo run --example simulate -- --seed {seed} --trace"
        );
    }
    assert_eq!(counts.histories, HISTORIES);
    assert!(counts.events >= 1_000 * HISTORIES);
    assert!(counts.loads_good > HISTORIES && counts.stores_done > HISTORIES);
    let never: Vec<&Fault> = ALL
        .iter()
        .filter(|f| counts.faults[**f as usize] == 0)
        .collect();
    assert!(never.is_empty(), "these never happened: {never:?}");
}

#[test]
fn every_mistake_is_seen_and_without_it_the_same_histories_are_clean() {
    let mut missed = Vec::new();
    for mistake in MISTAKES {
        let wrong = run_many(1, UNTIL_SEEN, threads(), 1, mistake.wrong, &mistake.shape);
        match wrong.broken.first() {
            Some((seed, v)) if mistake.rules.contains(&v.rule) => {
                println!("{}: seed {seed} {v}", mistake.name)
            }
            other => missed.push(format!("{}: {other:?}", mistake.name)),
        }
        let right = run_many(1, 200, threads(), 1, Wrong::NOTHING, &mistake.shape);
        if let Some((seed, v)) = right.broken.first() {
            missed.push(format!(
                "{} not made, and still: seed {seed} {v}",
                mistake.name
            ));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn what_a_worker_does_not_look_at_the_sidecar_refuses() {
    let slip = Wrong {
        connector: &[Slip::StageUnchecked],
        ..Wrong::NOTHING
    };
    let unowned = MISTAKES
        .iter()
        .find(|m| m.wrong.connector == slip.connector)
        .unwrap();
    let summary = run_many(1, 200, threads(), 1, slip, &unowned.shape);
    assert_eq!(summary.broken, []);
    assert!(summary.counts.faults[Fault::StageRefused as usize] > 0);
}

#[test]
fn a_history_is_a_function_of_its_seed() {
    let windows = |p| Profile {
        windows: 3,
        stages: 2,
        stage_rows: 8,
        ..p
    };
    for seed in [3, 77, 1_024] {
        let [one, other] = [(); 2].map(|()| run(seed, Wrong::NOTHING, &windows, false).counts);
        assert!(one.faults[Fault::StageStored as usize] > 0);
        assert_eq!((one.events, one.faults), (other.events, other.faults));
        assert_eq!(
            (one.loads_good, one.stores_done),
            (other.loads_good, other.stores_done)
        );
    }
}
