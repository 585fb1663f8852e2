use super::*;

#[test]
fn a_few_histories_keep_every_rule() {
    let summary = run_many(1, 300, threads(), 1, Wrong::NOTHING, &|p| p);
    for (name, count) in summary.counts.list() {
        println!("{name:28} {count}");
    }
    println!("{:?}", summary.counts);
    if let Some((seed, violation)) = summary.broken.first().cloned() {
        guarded(seed, Wrong::NOTHING, &|p| p, true);
        panic!("seed {seed}: {violation}");
    }
}
