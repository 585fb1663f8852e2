//! Several processes in one folder: each operation of one beside any of another.

use super::{Rig, age, names};
use crate::filesystem::root::NEW;
use crate::testing::suite::{Memory, Sample};
use crate::{Cause, Get, Removal, Stored, Tier};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_that_write_an_object_at_once_one_does_and_both_read_it() {
    let rig = Arc::new(Rig::new());
    let (one, other) = (Arc::new(rig.open().await), Arc::new(rig.open().await));
    for number in 0..40 {
        let sample = Sample::new(1, number, &[70_000, 5_001]);
        let mut puts = JoinSet::new();
        for tier in [&one, &other, &one, &other] {
            let (tier, put) = (tier.clone(), sample.put(&rig.memory));
            puts.spawn(async move { tier.put(put).await });
        }
        let stored = puts.join_all().await;
        let new = stored.iter().filter(|s| **s == Ok(Stored::New)).count();
        let already = stored.iter().filter(|s| **s == Ok(Stored::Already)).count();
        assert_eq!((new, already), (1, 3), "{stored:?}");
        rig.check(&one, &sample).await;
        rig.check(&other, &sample).await;
    }
    let left = names(&rig.path());
    assert_eq!(left.len(), 41, "the format and the objects: {left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_beside_one_that_removes_gets_the_object_or_a_miss() {
    let rig = Arc::new(Rig::new());
    let (one, other) = (Arc::new(rig.open().await), Arc::new(rig.open().await));
    let sample = Sample::new(1, 0, &[300_000, 9]);
    let (mut tasks, name) = (JoinSet::new(), sample.name());
    for _ in 0..100 {
        rig.put(&one, &sample).await;
        let (reader, get, expected) = (one.clone(), sample.get_all(&rig.memory), sample.clone());
        let read = tokio::spawn(async move {
            match reader.get(get.clone()).await {
                Ok(_) => assert!(expected.lies_in(&get.places)),
                Err(e) => assert_eq!(e.cause, Cause::Missing, "{e}"),
            }
        });
        let (remover, name) = (other.clone(), name.clone());
        tasks.spawn(async move {
            let removed = remover.remove(Removal::Named(&[name])).await;
            assert_eq!(removed, Ok(1));
        });
        tasks.join_next().await.unwrap().unwrap();
        read.await.unwrap();
    }
}

#[tokio::test]
async fn an_object_is_a_file_with_the_name_and_the_bytes_of_a_bucket() {
    let rig = Rig::new();
    let tier = rig.open().await;
    let sample = Sample::new(1, 0, &[5_000, 8_192, 17]);
    rig.put(&tier, &sample).await;
    let bytes = std::fs::read(rig.file(&sample)).unwrap();
    assert_eq!(bytes.len() as u64, sample.object.total_bytes());
    let head = sample.object.encode().unwrap();
    assert_eq!(bytes[..head.len()], head);
    let mut expected = head.clone();
    for (offset, section) in sample.object.offsets().into_iter().zip(&sample.bytes) {
        expected.resize(offset as usize, 0);
        expected.extend(section);
    }
    assert!(bytes == expected);
}

#[tokio::test]
async fn an_unusable_object_goes_and_one_that_took_its_name_since_stays() {
    let rig = Rig::new();
    let (one, other) = (rig.open().await, rig.open().await);
    let (sample, memory) = (Sample::new(1, 0, &[5_000]), Memory::new(1 << 20));
    let name = sample.name();
    rig.put(&one, &sample).await;
    assert_eq!(
        one.remove(Removal::Unusable(&name)).await,
        Ok(0),
        "never read"
    );
    rig.check(&one, &sample).await;
    assert_eq!(one.remove(Removal::Unusable(&name)).await, Ok(1));
    rig.put(&one, &sample).await;
    rig.check(&one, &sample).await;
    assert_eq!(
        other
            .remove(Removal::Named(std::slice::from_ref(&name)))
            .await,
        Ok(1)
    );
    other.put(sample.put(&memory)).await.unwrap();
    assert_eq!(
        one.remove(Removal::Unusable(&name)).await,
        Ok(0),
        "a newer one"
    );
    rig.check(&other, &sample).await;
}

#[tokio::test]
async fn a_torn_object_is_corrupt_and_an_unfinished_file_is_none() {
    let rig = Rig::new();
    let tier = rig.open().await;
    let sample = Sample::new(1, 0, &[50_000]);
    rig.put(&tier, &sample).await;
    let whole = std::fs::read(rig.file(&sample)).unwrap();
    let total = whole.len();
    for cut in [0, 100, 511, 512, 4_000, 4_096, 20_000, total - 1] {
        std::fs::write(rig.file(&sample), &whole[..cut]).unwrap();
        let get = Get {
            name: sample.name(),
            places: sample.get_all(&rig.memory).places,
        };
        let error = tier.get(get).await.unwrap_err();
        assert_eq!(error.cause, Cause::Corrupt, "cut at {cut}: {error}");
    }
    std::fs::remove_file(rig.file(&sample)).unwrap();
    let unfinished = rig.file(&sample).with_file_name(format!("{NEW}1-2"));
    std::fs::write(&unfinished, &whole[..20_000]).unwrap();
    assert_eq!(tier.lookup(&[sample.name()]).await, Ok(vec![false]));
    let page = tier.list(None, 10).await.unwrap();
    assert_eq!((page.objects.len(), page.foreign, page.next), (0, 0, None));
    rig.put(&tier, &sample).await;
    rig.check(&tier, &sample).await;
    assert!(unfinished.exists(), "its writer may be alive");
}

#[tokio::test]
async fn unfinished_files_of_a_day_ago_go_and_younger_ones_stay() {
    const DAY: Duration = Duration::from_secs(24 * 3_600);
    let rig = Rig::new();
    let tier = rig.open().await;
    let sample = Sample::new(1, 0, &[5_000]);
    rig.put(&tier, &sample).await;
    let (old, young) = (
        rig.file(&sample).with_file_name(format!("{NEW}1-1")),
        rig.path().join(format!("{NEW}1-2")),
    );
    let notes = rig.file(&sample).with_file_name("notes.new");
    let foreign = rig.path().join(format!("{NEW}plan"));
    for file in [&old, &young, &notes, &foreign] {
        std::fs::write(file, "torn").unwrap();
    }
    age(&old, DAY + Duration::from_secs(60));
    age(&notes, DAY * 9);
    age(&foreign, DAY * 9);
    age(&rig.file(&sample), DAY * 9);
    age(&young, DAY - Duration::from_secs(60));
    assert_eq!(tier.live.folder.tidy(DAY), Ok(1));
    assert_eq!(
        [&old, &young, &notes, &foreign].map(|f| f.exists()),
        [false, true, true, true]
    );
    rig.check(&tier, &sample).await;
}

#[tokio::test]
async fn new_files_and_folders_have_the_permissions_of_the_folder() {
    let rig = Rig::new();
    std::fs::create_dir(rig.path()).unwrap();
    let mode = |mode| std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(rig.path(), mode(0o2770)).unwrap();
    let tier = rig.open().await;
    let sample = Sample::new(1, 0, &[5_000]);
    rig.put(&tier, &sample).await;
    let of =
        |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(of(&rig.file(&sample)), 0o660);
    for folder in rig.file(&sample).ancestors().skip(1).take(4) {
        assert_eq!(of(folder), 0o2770, "{}", folder.display());
    }
    assert_eq!(of(&rig.path().join("format")), 0o660);
}
