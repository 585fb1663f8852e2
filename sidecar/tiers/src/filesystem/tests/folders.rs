//! Folders that the tier accepts and refuses, and the loss of its folder.

use super::{Rig, config_at, names, quiet};
use crate::disk::{self, Disk};
use crate::filesystem::{FileSystem, Folder, Options};
use crate::testing::suite::Sample;
use crate::{Cause, Page, Removal, Stored, Tier, Writes};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::Duration;

async fn refused(rig: &Rig) -> (Cause, String) {
    let error = rig.try_open().await.unwrap_err();
    (error.cause, error.detail)
}

#[tokio::test]
async fn a_folder_that_is_missing_no_folder_or_not_ours_is_named() {
    let rig = Rig::new();
    let (cause, detail) = refused(&rig).await;
    assert_eq!(cause, Cause::Gone);
    assert!(detail.contains("kv"), "{detail}");
    std::fs::write(rig.path(), "a file").unwrap();
    let (cause, detail) = refused(&rig).await;
    assert_eq!(cause, Cause::Config);
    assert!(detail.contains("is not a folder"), "{detail}");
    std::fs::remove_file(rig.path()).unwrap();
    std::fs::create_dir(rig.path()).unwrap();
    for (format, said) in [
        ("something else\n", "not the format file"),
        ("kvcachepool-filesystem 2\n", "of format 2"),
    ] {
        std::fs::write(rig.path().join("format"), format).unwrap();
        let (cause, detail) = refused(&rig).await;
        assert_eq!(cause, Cause::Config);
        assert!(detail.contains(said), "{detail}");
    }
    assert_eq!(names(&rig.path()), ["format"], "nothing was made in it");
}

#[tokio::test]
async fn neither_tier_with_files_takes_the_folder_of_the_other() {
    let rig = Rig::new();
    drop(rig.open().await);
    assert!(FileSystem::is_at(&rig.path()));
    let refused = Disk::open(&rig.path(), 1 << 30, disk::Options::default()).unwrap_err();
    assert_eq!(refused.cause, Cause::Config, "{refused}");
    let other = rig.temp.path().join("disk");
    std::fs::create_dir(&other).unwrap();
    Disk::open(&other, 1 << 30, disk::Options::default())
        .unwrap()
        .close();
    assert!(!FileSystem::is_at(&other));
    let refused = FileSystem::open(&config_at(&other), quiet())
        .await
        .unwrap_err();
    assert_eq!(refused.cause, Cause::Config, "{refused}");
}

#[tokio::test]
async fn foreign_names_are_counted_once_and_left_alone() {
    let rig = Rig::new();
    let tier = rig.open().await;
    let samples: Vec<_> = (0..9).map(|n| Sample::new(1, n, &[3_000])).collect();
    for sample in &samples {
        rig.put(&tier, sample).await;
    }
    let elsewhere = rig.temp.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let object = rig.file(&samples[0]);
    let upper = |path: &std::path::Path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        path.with_file_name(name.replacen(|c: char| c.is_ascii_digit(), "F", 1))
    };
    let files = [
        rig.path().join("notes.txt"),
        rig.path().join("zzz"),
        object.with_file_name("0notes"),
        upper(&object),
        object.with_extension("old"),
        object.ancestors().nth(2).unwrap().join("README"),
    ];
    for file in &files {
        std::fs::write(file, "mine").unwrap();
    }
    std::os::unix::fs::symlink(&elsewhere, rig.path().join("0123456789abcdef")).unwrap();
    std::fs::create_dir_all(rig.path().join("lost+found")).unwrap();
    std::fs::write(object.with_file_name(".nfs0001"), "kept open").unwrap();
    for limit in [1, 2, 4, 9, 100] {
        let (mut from, mut found, mut foreign) = (None, 0, 0);
        loop {
            let page = tier.list(from.as_deref(), limit).await.unwrap();
            assert!(page.objects.len() <= limit);
            found += page.objects.len();
            foreign += page.foreign;
            let Some(next) = page.next else { break };
            assert_ne!(from.as_ref(), Some(&next));
            from = Some(next);
        }
        assert_eq!(
            (found, foreign),
            (9, files.len() as u64 + 1),
            "in pages of {limit}"
        );
    }
    let all: Vec<_> = samples.iter().map(Sample::name).collect();
    assert_eq!(tier.remove(Removal::Named(&all)).await, Ok(9));
    for file in files {
        assert_eq!(std::fs::read_to_string(file).unwrap(), "mine");
    }
}

#[tokio::test]
async fn a_link_or_a_folder_under_the_name_of_an_object_is_no_object() {
    let rig = Rig::new();
    let tier = rig.open().await;
    let (linked, folder) = (Sample::new(1, 0, &[3_000]), Sample::new(1, 1, &[3_000]));
    for sample in [&linked, &folder] {
        std::fs::create_dir_all(rig.file(sample).parent().unwrap()).unwrap();
    }
    let elsewhere = rig.temp.path().join("elsewhere");
    std::fs::write(&elsewhere, "secret").unwrap();
    std::os::unix::fs::symlink(&elsewhere, rig.file(&linked)).unwrap();
    std::fs::create_dir(rig.file(&folder)).unwrap();
    for sample in [&linked, &folder] {
        let name = sample.name();
        assert_eq!(
            tier.lookup(std::slice::from_ref(&name)).await,
            Ok(vec![false])
        );
        let error = tier.head(&name).await.unwrap_err();
        assert_eq!(error.cause, Cause::Foreign, "{error}");
        assert_eq!(tier.remove(Removal::Named(&[name])).await, Ok(0));
        let stored = tier.put(sample.put(&rig.memory)).await;
        assert_eq!(stored, Ok(Stored::Already), "nothing is replaced");
    }
    assert_eq!(std::fs::read_to_string(elsewhere).unwrap(), "secret");
}

#[tokio::test]
async fn a_folder_that_went_away_is_gone_until_it_is_back() {
    let rig = Rig::new();
    let tier = rig.open().await;
    let sample = Sample::new(1, 0, &[3_000]);
    rig.put(&tier, &sample).await;
    let aside = rig.temp.path().join("aside");
    std::fs::rename(rig.path(), &aside).unwrap();
    let cause = |result: Result<(), crate::TierError>| result.unwrap_err().cause;
    assert_eq!(cause(tier.usage().await.map(drop)), Cause::Gone);
    assert_eq!(
        cause(tier.lookup(&[sample.name()]).await.map(drop)),
        Cause::Gone
    );
    let put = tier.put(sample.put(&rig.memory)).await;
    assert_eq!(cause(put.map(drop)), Cause::Gone);
    // An empty folder at the path, as below a mount point, is not taken for an empty tier.
    std::fs::create_dir(rig.path()).unwrap();
    assert_eq!(
        cause(tier.lookup(&[sample.name()]).await.map(drop)),
        Cause::Gone
    );
    let put = tier.put(sample.put(&rig.memory)).await;
    assert_eq!(cause(put.map(drop)), Cause::Gone);
    std::fs::remove_dir_all(rig.path()).unwrap();
    std::fs::rename(&aside, rig.path()).unwrap();
    rig.check(&tier, &sample).await;
    tier.usage().await.unwrap();
}

#[tokio::test]
async fn a_tier_that_may_not_write_leaves_no_trace() {
    let rig = Rig::new();
    std::fs::create_dir(rig.path()).unwrap();
    let options = Options {
        writes: Writes::new(false),
        ..Options::default()
    };
    let reader = FileSystem::open(&rig.config(), options).await.unwrap();
    assert_eq!(reader.usage().await.unwrap().objects, 0);
    assert!(names(&rig.path()).is_empty());
    let (writer, sample) = (rig.open().await, Sample::new(1, 0, &[3_000]));
    rig.put(&writer, &sample).await;
    rig.check(&reader, &sample).await;
}

#[tokio::test]
async fn a_hung_mount_keeps_one_thread_however_often_it_is_opened() {
    let rig = Rig::new();
    drop(rig.open().await);
    let options = Options {
        opening: Duration::from_millis(200),
        ..quiet()
    };
    let looks = Arc::new(AtomicUsize::new(0));
    let mut mounts = Vec::new();
    for _ in 0..10 {
        let (answers, answer) = mpsc::channel::<()>();
        mounts.push(answers);
        let looked = looks.clone();
        let look = move |_: &Folder| {
            looked.fetch_add(1, Relaxed);
            let _ = answer.recv();
            Ok(Page::default())
        };
        let opened = FileSystem::open_after(&rig.config(), options.clone(), look).await;
        let error = opened.unwrap_err();
        assert_eq!(error.cause, Cause::Timeout, "{error}");
    }
    assert_eq!(looks.load(Relaxed), 1);
    drop(mounts);
    let patient = Options {
        opening: Duration::from_secs(20),
        ..options
    };
    let opening = async {
        // The first look may need a moment to return.
        while FileSystem::open(&rig.config(), patient.clone())
            .await
            .is_err()
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let opened = tokio::time::timeout(Duration::from_secs(20), opening).await;
    assert!(opened.is_ok(), "the server answers again");
}
