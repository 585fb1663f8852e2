//! Plans the objects of a pool: its finalizer, the password of its managed servers, and the objects of `desired`.

use super::deletion::{foreign_finalizers, has_finalizer};
use crate::desired::{job, redis};
use crate::names;
use crate::reconcile::memory::Memory;
use crate::reconcile::observe::{Active, Observed};
use crate::reconcile::step::Step;
use kube::ResourceExt;
use kube::api::DynamicObject;
use std::time::Duration;

/// Interval between checks that the password exists, because it may be deleted.
const PASSWORD_INTERVAL: Duration = Duration::from_secs(300);

/// Applies changed objects and deletes those that the pool no longer needs. Changes nothing while the spec is not accepted.
pub fn plan(observed: &Observed<'_>, active: &Active<'_>, memory: &mut Memory) -> Vec<Step> {
    if active.settings.is_err() {
        return Vec::new();
    }
    let mut steps = Vec::new();
    // The finalizer comes first, because pods may have stored objects already.
    steps.extend(finalizers(active));
    let is_old = |at| observed.clock.duration_since(at) >= PASSWORD_INTERVAL;
    if redis::managed(active.spec).is_some() && memory.password.is_none_or(is_old) {
        steps.push(Step::Password);
    }
    for (object, live) in &active.objects {
        let Memory { uid, applied, .. } = memory;
        let application = applied.application(object, live.as_ref(), uid);
        steps.extend(application.map(|a| Step::Apply(Box::new(a))));
    }
    for (types, name) in &active.children {
        let is =
            |(o, _): &(DynamicObject, _)| o.types.as_ref() == Some(types) && o.name_any() == *name;
        if !active.objects.iter().any(is) {
            steps.push(Step::Delete(types.clone(), name.clone()));
        }
    }
    steps
}

/// Sets or removes the finalizer, as `deletionPolicy` requires.
fn finalizers(active: &Active<'_>) -> Option<Step> {
    let pool = active.spec;
    let purges = job::purges(pool);
    (purges != has_finalizer(pool)).then(|| {
        let mut finalizers = foreign_finalizers(pool);
        finalizers.extend(purges.then(|| names::PURGE.to_owned()));
        Step::Finalizers(finalizers)
    })
}
