//! Finds the length of a present prefix by lookups of a few of its names: a full hit or a full miss costs at most 12 lookups for 512 names.
//! Knows nothing of tiers.

use futures::future::try_join_all;

/// Up to this many names are looked up one by one: fewer lookups would not suffice.
const EACH: usize = 4;
/// Concurrent lookups when a part of the prefix is present.
const AT_ONCE: usize = 7;

/// Whether each of `count` names in prefix order is present. With many names, those after the first absent one count as absent, and those
/// between two present ones as present.
pub async fn present<E, F: Future<Output = Result<bool, E>>>(
    count: usize,
    ask: impl Fn(usize) -> F,
) -> Result<Vec<bool>, E> {
    if count <= EACH {
        return try_join_all((0..count).map(ask)).await;
    }
    let there = length(count, ask).await?;
    Ok((0..count).map(|index| index < there).collect())
}

/// Number of present names, from the first on.
async fn length<E, F: Future<Output = Result<bool, E>>>(
    count: usize,
    ask: impl Fn(usize) -> F,
) -> Result<usize, E> {
    // Most prefixes are present completely or not at all: check this first.
    let (first, last) = (0, count - 1);
    let ends = try_join_all([first, last].map(&ask)).await?;
    if ends.first() != Some(&true) {
        return Ok(0);
    }
    // At doubling distances: long and short common prefixes of prompts are equally frequent.
    let between: Vec<usize> = (1..usize::BITS)
        .map(|power| (1 << power) - 1)
        .take_while(|index| *index < last)
        .collect();
    let answers = try_join_all(between.iter().map(|index| ask(*index))).await?;
    let (mut there, mut absent) = (first, count);
    let asked = between.iter().copied().chain([last]);
    for (index, answer) in asked.zip(answers.iter().copied().chain(ends.last().copied())) {
        if !answer {
            absent = index;
            break;
        }
        there = index;
    }
    if absent == count {
        return Ok(count);
    }
    while absent - there > 1 {
        let width = absent - there;
        let parts = AT_ONCE.min(width - 1) + 1;
        let inside: Vec<usize> = (1..parts)
            .map(|part| there + width * part / parts)
            .collect();
        let answers = try_join_all(inside.iter().map(|index| ask(*index))).await?;
        for (index, answer) in inside.into_iter().zip(answers) {
            if !answer {
                absent = index;
                break;
            }
            there = index;
        }
    }
    Ok(absent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use std::cell::Cell;
    use std::convert::Infallible;

    /// Answers and the number of questions.
    fn asked(holds: &[bool]) -> (Vec<bool>, usize) {
        let questions = Cell::new(0);
        let ask = |index: usize| {
            questions.set(questions.get() + 1);
            let answer = holds[index];
            async move { Ok::<_, Infallible>(answer) }
        };
        let answers = present(holds.len(), ask).now_or_never().unwrap();
        (answers.unwrap(), questions.get())
    }

    fn prefix(count: usize, there: usize) -> Vec<bool> {
        (0..count).map(|index| index < there).collect()
    }

    #[test]
    fn every_prefix_of_every_length_is_found() {
        for count in (0..40).chain([511, 512, 513, 1_000]) {
            for there in 0..=count {
                let holds = prefix(count, there);
                let (answers, questions) = asked(&holds);
                assert_eq!(answers, holds, "{there} of {count}");
                assert!(questions <= 32, "{there} of {count}: {questions}");
            }
        }
    }

    #[test]
    fn all_or_none_of_512_names_cost_at_most_12_questions() {
        assert_eq!(asked(&prefix(512, 0)).1, 2);
        assert_eq!(asked(&prefix(512, 512)).1, 10);
    }

    #[test]
    fn a_few_names_are_asked_one_by_one() {
        for holds in [
            [true, false, true],
            [false, true, true],
            [false, false, true],
        ] {
            assert_eq!(asked(&holds), (holds.to_vec(), 3));
        }
    }

    #[test]
    fn behind_the_first_name_that_is_found_absent_all_are_absent() {
        let mut holds = prefix(100, 100);
        holds[31] = false;
        let (answers, _) = asked(&holds);
        let there = answers.iter().take_while(|there| **there).count();
        assert!(there <= 31, "{there}");
        assert!(answers[there..].iter().all(|there| !there));
        holds = prefix(100, 100);
        holds[0] = false;
        assert_eq!(asked(&holds).0, prefix(100, 0));
    }
}
