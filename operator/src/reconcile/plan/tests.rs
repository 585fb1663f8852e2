//! At least one test for each kind of step, and one for a pool that needs none.

use super::*;
use crate::canary::CanaryResult;
use crate::desired::tests::{defaults, pool};
use crate::desired::{desired, settings};
use crate::names;
use crate::pods::tests::{at, engine, pod, running, sized, waiting};
use crate::pods::{self, Phase, Pod, PoolRef, Server, SidecarState, Summary};
use crate::reconcile::caches::Stored;
use crate::reconcile::children::Child;
use crate::reconcile::error::ApplyError;
use crate::reconcile::events::{Event, Severity};
use crate::reconcile::observe::{Active, Outcome};
use crate::reconcile::purge::{JobState, Purge, PurgeJob};
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use kube::api::{DynamicObject, TypeMeta};
use kube::core::{DeserializeGuard, Status};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A pool with this spec, created at second 0.
fn stored(spec: Value) -> Stored {
    let mut pool = pool(spec);
    pool.metadata.creation_timestamp = Some(Time(at(0)));
    DeserializeGuard(Ok(pool))
}

/// A snapshot at second 10 with these pods. Injection works, and children are not watched.
fn observed(stored: &Stored, pods: impl IntoIterator<Item = Pod>) -> Observed<'_> {
    let spec = stored.0.as_ref().unwrap();
    let objects = desired(spec, &defaults()).unwrap_or_default();
    Observed {
        now: at(10),
        clock: Instant::now(),
        name: PoolRef::new("serving", "llama"),
        about: stored.object_ref(&()),
        stored,
        pods: pods.into_iter().map(Arc::new).collect(),
        pool: Pool::Active(Box::new(Active {
            spec,
            settings: settings(spec, &defaults()),
            objects: objects.into_iter().map(|object| (object, None)).collect(),
            children: Vec::new(),
            servers: Vec::new(),
            refused: Vec::new(),
            refused_servers: Vec::new(),
            usage: Summary {
                known: true,
                ..Summary::default()
            },
            canary: CanaryResult::Injected,
            allow_pod_patch: false,
        })),
        status_interval: SignedDuration::from_secs(60),
        outcome: None,
    }
}

fn active<'o, 'a>(observed: &'o mut Observed<'a>) -> &'o mut Active<'a> {
    match &mut observed.pool {
        Pool::Active(active) => active,
        _ => panic!("the pool is active"),
    }
}

/// Plans the steps after the pool's objects were applied.
fn after_objects(observed: &mut Observed<'_>, memory: &mut Memory) -> Vec<Step> {
    observed.outcome = Some(Outcome::default());
    plan(observed, memory)
}

fn hash() -> String {
    settings(&pool(json!({})), &defaults()).unwrap().hash()
}

/// A pod whose sidecar has the settings of the pool.
fn current(mut pod: Pod) -> Pod {
    pod.injection.as_mut().unwrap().hash = hash().into();
    pod.config_generation = Some(7);
    pod
}

/// A pod that hangs: its sidecar's image cannot be pulled.
fn hung(name: &str) -> Pod {
    let mut pod = current(waiting(name, "ErrImagePull"));
    pod.phase = Phase::Pending;
    pod.ready = false;
    pod.own = [engine(SidecarState::Unseen)].into();
    pod
}

/// Acts as an API server that accepts all writes.
fn apply(steps: Vec<Step>, observed: &mut Observed<'_>, memory: &mut Memory) {
    for step in steps {
        match step {
            Step::Apply(application) => {
                let name = application.object.name_any();
                memory.applied.record(*application, "5".into(), None);
                let child = Child {
                    resource_version: "5".into(),
                    generation: None,
                    owner_uid: memory.uid.clone(),
                    applied: None,
                    servers: None,
                };
                let objects = &mut active(observed).objects;
                let object = objects.iter_mut().find(|(o, _)| o.name_any() == name);
                object.unwrap().1 = Some(Some(child));
            }
            Step::Status(status, _) => {
                memory.written = Some((*status, "6".to_owned()));
                memory.writes.add(observed.now);
            }
            step => panic!("not expected: {step:?}"),
        }
    }
}

fn events(steps: &[Step]) -> Vec<&Event> {
    let mut events = Vec::new();
    for step in steps {
        if let Step::Event(event) = step {
            events.push(event);
        }
    }
    events
}

/// Kind of the object and reason of each event.
fn reasons(steps: &[Step]) -> Vec<(&str, &str)> {
    fn kind_and_reason(e: &Event) -> (&str, &str) {
        (e.about.kind.as_deref().unwrap_or_default(), &e.reason)
    }
    events(steps).into_iter().map(kind_and_reason).collect()
}

#[test]
fn no_steps_if_nothing_changed() {
    let stored = stored(json!({}));
    let mut observed = observed(&stored, [current(running("a"))]);
    let mut memory = Memory::default();
    let objects = plan(&observed, &mut memory);
    assert!(
        matches!(&*objects, [Step::Apply(map)] if map.object.name_any() == "kvcachepool-llama")
    );
    apply(objects, &mut observed, &mut memory);
    assert_eq!(plan(&observed, &mut memory), []);

    let status = after_objects(&mut observed, &mut memory);
    apply(status, &mut observed, &mut memory);
    assert_eq!(plan(&observed, &mut memory), []);
}

#[test]
fn changed_objects_are_applied_and_unneeded_ones_deleted() {
    let stored = stored(json!({}));
    let mut observed = observed(&stored, []);
    let mut memory = Memory::default();
    let objects = plan(&observed, &mut memory);
    apply(objects, &mut observed, &mut memory);
    let types = TypeMeta {
        api_version: "v1".to_owned(),
        kind: "ConfigMap".to_owned(),
    };
    let wanted = active(&mut observed).objects[0].0.name_any();
    active(&mut observed).children =
        vec![(types.clone(), "old".to_owned()), (types.clone(), wanted)];
    let unwanted = Step::Delete(types, "old".to_owned());
    assert_eq!(
        plan(&observed, &mut memory),
        std::slice::from_ref(&unwanted)
    );

    let live = active(&mut observed).objects[0].1.as_mut().unwrap();
    live.as_mut().unwrap().resource_version = "8".into();
    let steps = plan(&observed, &mut memory);
    assert!(matches!(&steps[0], Step::Apply(_)));
    assert_eq!(steps[1..], [unwanted], "deletions come last");
}

/// Steps for the StatefulSet of a pool whose status is of this generation, and which has this object in the cluster.
fn servers(
    observed_generation: i64,
    live: Option<Option<Child>>,
    memory: &mut Memory,
) -> Vec<Step> {
    let mut pool = pool(json!({"shared": {"redis": {"managed": {"memoryPerShard": "1Gi"}}}}));
    let status = json!({"pods": {}, "observedGeneration": observed_generation});
    pool.status = serde_json::from_value(status).unwrap();
    let stored = DeserializeGuard(Ok(pool));
    let mut observed = observed(&stored, []);
    let objects = &mut active(&mut observed).objects;
    let set = objects
        .iter_mut()
        .find(|(o, _)| o.types.as_ref().unwrap().kind == "StatefulSet");
    set.unwrap().1 = live;
    let of_set = |step: &Step| match step {
        Step::Apply(a) | Step::ApplyInTurn(a) => {
            a.object.types.as_ref().unwrap().kind == "StatefulSet"
        }
        Step::Delete(types, _) => types.kind == "StatefulSet",
        _ => false,
    };
    plan(&observed, memory).into_iter().filter(of_set).collect()
}

#[test]
fn servers_are_replaced_in_turn_unless_their_pool_was_edited() {
    let live = |applied: &str| {
        Some(Some(Child {
            resource_version: "5".into(),
            generation: Some(1),
            owner_uid: String::new(),
            applied: Some(applied.to_owned()),
            servers: None,
        }))
    };
    let steps = |generation, live| servers(generation, live, &mut Memory::default());
    let in_turn = |steps: Vec<Step>| matches!(&*steps, [Step::ApplyInTurn(_)]);
    let at_once = |steps: Vec<Step>| matches!(&*steps, [Step::Apply(_)]);
    assert!(in_turn(steps(7, live("of another version"))));
    assert!(
        in_turn(steps(7, None)),
        "it is unknown whether the servers exist"
    );
    assert!(
        at_once(steps(6, live("of another spec"))),
        "the pool was edited"
    );
    assert!(at_once(steps(7, Some(None))), "the StatefulSet was deleted");
    // Another client changed the StatefulSet, and the operator restores it.
    let mut memory = Memory::default();
    let Some(Step::ApplyInTurn(first)) = servers(7, live("of another version"), &mut memory).pop()
    else {
        panic!("in turn");
    };
    memory.applied.record(*first, "6".into(), Some(2));
    assert!(at_once(servers(7, live("edited"), &mut memory)));
}

#[test]
fn servers_of_another_mode_are_deleted_before_new_ones_are_made() {
    let live_with = |owner: &str, servers, applied: Option<&str>| {
        Some(Some(Child {
            resource_version: "5".into(),
            generation: Some(1),
            owner_uid: owner.to_owned(),
            applied: applied.map(str::to_owned),
            servers,
        }))
    };
    let live = |owner: &str, servers| live_with(owner, servers, Some("of the mode before"));
    let uid = pool(json!({})).metadata.uid.unwrap();
    let steps = |live| servers(6, live, &mut Memory::default());
    let found = steps(live(&uid, Some(6)));
    assert!(matches!(&found[..], [Step::Delete(_, name)] if name == "kvcachepool-llama"));
    for other in [
        live(&uid, None),
        live("of another owner", Some(6)),
        live_with(&uid, Some(6), None),
        Some(None),
    ] {
        assert!(matches!(&steps(other)[..], [Step::Apply(_)]));
    }
}

/// Replicas of the StatefulSet that is applied for a cluster of four servers which has `live` now, and whose manager has this shape.
fn applied_servers(live: Option<Option<i64>>, manager: (&str, bool)) -> Option<i64> {
    let managed = json!({"mode": "Cluster", "shards": 4, "memoryPerShard": "1Gi"});
    let mut pool = pool(json!({"shared": {"redis": {"managed": managed}}}));
    // The status is already of the edit.
    let status = json!({"pods": {}, "observedGeneration": 7});
    pool.status = serde_json::from_value(status).unwrap();
    let stored = DeserializeGuard(Ok(pool));
    let mut observed = observed(&stored, []);
    let active = active(&mut observed);
    let (shape, ready) = manager;
    active.servers = vec![Arc::new(Server {
        name: "kvcachepool-llama-cluster-0".into(),
        namespace: "serving".into(),
        pool: "llama".into(),
        shape: Some(shape.into()),
        ready,
        trouble: None,
    })];
    let kind = |o: &DynamicObject| o.types.as_ref().unwrap().kind.clone();
    let mut objects = active.objects.iter_mut();
    let set = objects.find(|(o, _)| kind(o) == "StatefulSet").unwrap();
    set.1 = live.map(|live| {
        live.map(|servers| Child {
            resource_version: "5".into(),
            generation: Some(1),
            owner_uid: String::new(),
            applied: None,
            servers: Some(servers),
        })
    });
    let steps = plan(&observed, &mut Memory::default());
    let retry = Step::Requeue(Duration::from_secs(10));
    assert_eq!(
        steps.contains(&retry),
        live.is_none(),
        "kinds are listed soon"
    );
    let mut sets = steps.into_iter().filter_map(|step| match step {
        Step::Apply(a) if kind(&a.object) == "StatefulSet" => Some((a.object, false)),
        Step::ApplyInTurn(a) => Some((a.object, true)),
        _ => None,
    });
    let (set, in_turn) = sets.next()?;
    let replicas = set.data["spec"]["replicas"].as_i64();
    let annotation = &set.annotations()[names::REPLICAS];
    assert_eq!(replicas.map(|n| n.to_string()).as_ref(), Some(annotation));
    let removes = live.flatten() > replicas;
    assert!(
        !(removes && in_turn),
        "a user's edit does not wait for other pools"
    );
    replicas
}

#[test]
fn servers_of_a_cluster_are_removed_after_the_manager_has_emptied_them() {
    let six = Some(Some(6));
    assert_eq!(
        applied_servers(six, ("6x1", true)),
        Some(6),
        "an old manager"
    );
    assert_eq!(applied_servers(six, ("4x1", false)), Some(6), "it works");
    assert_eq!(applied_servers(six, ("2x2", true)), Some(6), "other shards");
    assert_eq!(applied_servers(six, ("4x1", true)), Some(4));
}

#[test]
fn servers_of_a_cluster_are_added_at_once() {
    let busy = ("3x1", false);
    assert_eq!(applied_servers(Some(None), busy), Some(4));
    assert_eq!(applied_servers(None, busy), None, "their number is unknown");
}

#[test]
fn a_spec_that_is_not_accepted_changes_no_object() {
    let stored = stored(json!({"local": {"memory": {"perPod": "1"}}, "deletionPolicy": "Delete"}));
    let mut observed = observed(&stored, []);
    active(&mut observed).children = vec![(TypeMeta::default(), "old".to_owned())];
    assert!(active(&mut observed).settings.is_err());
    let mut memory = Memory::default();
    assert_eq!(plan(&observed, &mut memory), []);
    let steps = after_objects(&mut observed, &mut memory);
    assert!(matches!(&steps[0], Step::Status(..)));
}

#[test]
fn the_finalizer_follows_the_policy_and_precedes_the_objects() {
    let s3 = json!({"bucket": "kv-cache", "prefix": "prod", "auth": {"secretName": "keys"}});
    let spec = |policy: &str| json!({"deletionPolicy": policy, "shared": {"s3": s3}});
    let deletes = stored(spec("Delete"));
    let steps = plan(&observed(&deletes, []), &mut Memory::default());
    assert_eq!(
        steps[0],
        Step::Finalizers(vec![names::PURGE.to_owned()]),
        "{steps:?}"
    );
    let mut retains = stored(spec("Retain"));
    let finalizers = ["a", names::PURGE].map(str::to_owned);
    retains.0.as_mut().unwrap().metadata.finalizers = Some(finalizers.to_vec());
    let steps = plan(&observed(&retains, []), &mut Memory::default());
    assert_eq!(steps[0], Step::Finalizers(vec!["a".to_owned()]));
}

#[test]
fn managed_servers_get_their_password_before_they_start() {
    let managed = json!({"memoryPerShard": "16Gi"});
    let stored = stored(json!({"shared": {"redis": {"managed": managed}}}));
    let observed = observed(&stored, []);
    let mut memory = Memory::default();
    let steps = plan(&observed, &mut memory);
    assert_eq!(steps[0], Step::Password);
    assert!(steps[1..].iter().all(|s| matches!(s, Step::Apply(_))));
    memory.password = Some(observed.clock);
    assert!(!plan(&observed, &mut memory).contains(&Step::Password));
}

#[test]
fn changed_conditions_are_written_with_events_and_changed_counts_wait() {
    let stored = stored(json!({}));
    let mut observed = observed(&stored, [current(running("a"))]);
    let mut memory = Memory::default();
    observed.outcome = Some(Outcome {
        unapplied: Some(ApplyError::NoRandom),
        ..Outcome::default()
    });
    let steps = plan(&observed, &mut memory);
    let [Step::Status(status, events)] = &*steps else {
        panic!("{steps:?}");
    };
    let ready = status::condition(&status.conditions, status::READY).unwrap();
    assert_eq!((&*ready.reason, &**events), ("ApplyFailed", &[][..]));
    apply(steps, &mut observed, &mut memory);

    for (canary, severity) in [
        (CanaryResult::WebhookUnreachable, Severity::Warning),
        (CanaryResult::Injected, Severity::Normal),
    ] {
        active(&mut observed).canary = canary;
        let steps = after_objects(&mut observed, &mut memory);
        let reported =
            matches!(&*steps, [Step::Status(_, events)] if events[0].severity == severity);
        assert!(reported, "{steps:?}");
        apply(steps, &mut observed, &mut memory);
    }
    observed.pods.push(Arc::new(current(running("b"))));
    let steps = after_objects(&mut observed, &mut memory);
    assert_eq!(steps, [Step::Requeue(Duration::from_secs(60))]);
}

#[test]
fn a_pause_is_counted_and_reported_after_the_status_and_then_the_pod_is_replaced() {
    let stored = stored(json!({}));
    let mut observed = observed(&stored, [hung("a")]);
    let mut memory = Memory::default();
    let steps = after_objects(&mut observed, &mut memory);
    assert!(matches!(steps.last(), Some(Step::Requeue(_))), "{steps:?}");
    observed.now = at(100);
    let steps = after_objects(&mut observed, &mut memory);
    assert!(matches!(&steps[0], Step::Status(..)), "{steps:?}");
    let count = Step::Count("injection_pauses_total", "ErrImagePull".to_owned());
    assert_eq!(steps[1], count);
    let paused = [
        ("ReplicaSet", "PodsHeldBack"),
        ("KVCachePool", "PodsHeldBack"),
    ];
    assert_eq!(reasons(&steps[2..4]), paused);
    observed.now = at(103);
    let steps = after_objects(&mut observed, &mut memory);
    let replace = Step::Replace(observed.pods[0].clone());
    assert!(steps.contains(&replace), "{steps:?}");
}

#[test]
fn a_pod_that_hangs_is_replaced_also_after_somebody_has_disabled_injection() {
    let enabled = stored(json!({}));
    let mut memory = Memory::default();
    let mut steps = |stored: &Stored, second| {
        let mut observed = observed(stored, [hung("a")]);
        observed.now = at(second);
        after_objects(&mut observed, &mut memory)
    };
    for second in [0, 10] {
        steps(&enabled, second);
    }
    let disabled = stored(json!({"injection": {"mode": "Disabled"}}));
    for second in [20, 100] {
        steps(&disabled, second);
    }
    let found = steps(&disabled, 103);
    let replaced = found
        .iter()
        .any(|step| matches!(step, Step::Replace(pod) if pod.name == "a".into()));
    assert!(replaced, "{found:?}");
}

#[test]
fn a_missed_pod_is_reported_and_evicted_if_the_pool_requests_it() {
    let report = stored(json!({}));
    let mut memory = Memory::default();
    let steps = after_objects(&mut observed(&report, [pod("a")]), &mut memory);
    let missed = [("ReplicaSet", "Missed"), ("KVCachePool", "Missed")];
    assert_eq!(reasons(&steps), missed);
    assert!(!steps.iter().any(|s| matches!(s, Step::Evict(_))));

    let evict = stored(json!({"injection": {"onMissed": "Evict"}}));
    let mut memory = Memory::default();
    let mut of_job = pod("b");
    let owner = of_job.owner.as_mut().unwrap();
    (owner.kind, owner.uid) = ("Job".into(), "j".into());
    let mut observed = observed(&evict, [pod("a"), of_job]);
    let steps = after_objects(&mut observed, &mut memory);
    let evicting = Step::Requeue(Duration::from_secs(15));
    let evict = Step::Evict(observed.pods[0].clone());
    assert!(steps.ends_with(&[evict, evicting]), "{steps:?}");
    assert!(reasons(&steps).contains(&("Job", "NotEvicted")));
    active(&mut observed).canary = CanaryResult::WebhookUnreachable;
    let steps = after_objects(&mut observed, &mut memory);
    assert!(!steps.iter().any(|s| matches!(s, Step::Evict(_))));
}

#[test]
fn running_pods_are_updated_if_the_operator_may_patch_them() {
    let stored = stored(json!({"sidecar": {"updateStrategy": {"type": "InPlace"}}}));
    let mut older = current(running("a"));
    older.config_generation = Some(6);
    let mut observed = observed(&stored, [older]);
    let steps = after_objects(&mut observed, &mut Memory::default());
    let reported = events(&steps);
    assert_eq!(reported.last().unwrap().reason, "PodPatchNotAllowed");
    active(&mut observed).allow_pod_patch = true;
    let steps = after_objects(&mut observed, &mut Memory::default());
    let config = pods::Step::Config(observed.pods.clone());
    assert!(matches!(steps.last(), Some(Step::Update(step, _)) if *step == config));
}

#[test]
fn pods_of_another_size_are_resized_with_any_update_strategy() {
    let stored = stored(json!({}));
    let size = settings(stored.0.as_ref().unwrap(), &defaults()).unwrap();
    let mut other = current(running("a"));
    other.memory = Some(Box::new(sized(size.memory_bytes / 2)));
    let mut observed = observed(&stored, [other]);
    let steps = after_objects(&mut observed, &mut Memory::default());
    assert!(!steps.iter().any(|s| matches!(s, Step::Update(..))));
    active(&mut observed).allow_pod_patch = true;
    let steps = after_objects(&mut observed, &mut Memory::default());
    let resize = pods::Step::Resize(observed.pods.clone());
    assert!(matches!(steps.last(), Some(Step::Update(step, _)) if *step == resize));
    let condition = steps.iter().find_map(|step| match step {
        Step::Status(status, _) => crate::status::condition(&status.conditions, "SidecarsReady"),
        _ => None,
    });
    assert_eq!(condition.unwrap().reason, "MemoryResizing");
}

#[test]
fn a_pool_that_cannot_be_read_gets_a_status() {
    let stored = stored(json!({}));
    let mut observed = observed(&stored, [running("a")]);
    observed.pool = Pool::Malformed("no such field");
    let mut memory = Memory::default();
    let steps = plan(&observed, &mut memory);
    assert!(matches!(&*steps, [Step::Status(..)]), "{steps:?}");
    apply(steps, &mut observed, &mut memory);
    assert_eq!(plan(&observed, &mut memory), []);
    assert_eq!(after_objects(&mut observed, &mut memory), []);
}

fn wanted(found: Result<Option<JobState>, kube::Error>) -> Purge {
    let job = PurgeJob {
        name: "purge".to_owned(),
        wanted: json!({"kind": "Job"}),
        found,
    };
    Purge::Wanted {
        shared: vec![("redis", "serving/other".to_owned())],
        job: Some(job),
    }
}

fn refused(code: u16) -> kube::Error {
    kube::Error::Api(Box::new(Status {
        code,
        ..Status::default()
    }))
}

/// The steps except for the next pass, which is always due in two seconds, and the event about the skipped tier.
fn purging(observed: &Observed<'_>, memory: &mut Memory) -> Vec<Step> {
    let mut steps = plan(observed, memory);
    assert_eq!(steps.pop(), Some(Step::Requeue(Duration::from_secs(2))));
    if reasons(&steps).first() == Some(&("KVCachePool", "PurgeSkipped")) {
        steps.remove(0);
    }
    steps
}

/// The reason in the event of a single step that removes the finalizer.
fn released(steps: &[Step]) -> Option<&str> {
    match steps {
        [Step::Release(others, event)] if others.is_empty() => {
            Some(event.as_ref().map_or("", |e| &e.reason))
        }
        _ => None,
    }
}

#[test]
fn a_deleted_pool_is_held_until_its_job_has_ended() {
    let mut stored = stored(json!({}));
    stored.0.as_mut().unwrap().metadata.finalizers = Some(vec![names::PURGE.to_owned()]);
    let mut observed = observed(&stored, []);
    let mut memory = Memory::default();
    let mut steps_for = |purge| {
        observed.pool = Pool::Deleted(purge);
        purging(&observed, &mut memory)
    };
    assert_eq!(
        steps_for(wanted(Ok(None))),
        [Step::CreateJob(json!({"kind": "Job"}))]
    );
    assert_eq!(steps_for(wanted(Ok(Some(JobState::Running)))), []);
    let complete = steps_for(wanted(Ok(Some(JobState::Complete))));
    assert_eq!(released(&complete), Some("Purged"));
    let failed = steps_for(wanted(Ok(Some(JobState::Failed("denied".to_owned())))));
    assert_eq!(released(&failed), Some("PurgeFailed"));
    assert_eq!(released(&steps_for(Purge::NotWanted)), Some(""));
    assert_eq!(
        released(&steps_for(Purge::NotAccepted(Vec::new()))),
        Some("PurgeFailed")
    );
    assert_eq!(
        released(&steps_for(Purge::Malformed(String::new()))),
        Some("PurgeFailed")
    );
}

#[test]
fn a_job_that_the_api_server_refuses_is_tried_for_ten_minutes_unless_it_is_refused_for_good() {
    let stored = stored(json!({}));
    let mut observed = observed(&stored, []);
    observed.pool = Pool::Deleted(wanted(Ok(None)));
    let mut memory = Memory::default();
    let mut after = |code, second| {
        observed.now = at(second);
        observed.outcome = Some(Outcome {
            job_refused: Some(refused(code)),
            ..Outcome::default()
        });
        purging(&observed, &mut memory)
    };
    assert_eq!(reasons(&after(500, 10)), [("KVCachePool", "ApplyFailed")]);
    assert_eq!(reasons(&after(500, 610)), [("KVCachePool", "ApplyFailed")]);
    assert_eq!(released(&after(500, 611)), Some("PurgeFailed"));
    assert_eq!(
        released(&after(404, 20)),
        Some("PurgeFailed"),
        "no namespace"
    );

    observed.pool = Pool::Deleted(wanted(Err(refused(500))));
    (observed.outcome, memory.purge_refused) = (None, None);
    observed.now = at(10);
    assert_eq!(purging(&observed, &mut memory), []);
    // The Job could be read in between.
    observed.pool = Pool::Deleted(wanted(Ok(Some(JobState::Running))));
    observed.now = at(600);
    assert_eq!(purging(&observed, &mut memory), []);
    observed.pool = Pool::Deleted(wanted(Err(refused(500))));
    observed.now = at(611);
    assert_eq!(purging(&observed, &mut memory), []);
    observed.now = at(1212);
    let late = purging(&observed, &mut memory);
    assert_eq!(released(&late), Some("PurgeFailed"));
}
