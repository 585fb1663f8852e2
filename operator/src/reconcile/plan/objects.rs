//! The objects of a pool: its finalizer, the password of its managed servers, and what `desired` wants.

use super::deletion::{held, others};
use crate::desired::{job, redis};
use crate::names;
use crate::reconcile::memory::Memory;
use crate::reconcile::observe::{Active, Observed};
use crate::reconcile::step::Step;
use kube::ResourceExt;
use kube::api::DynamicObject;
use std::time::Duration;

/// Time after which the operator makes sure again that there is a password: somebody may have deleted it.
const PASSWORD_EVERY: Duration = Duration::from_secs(300);

/// Applies what differs and deletes what the pool does not want any more. Of a spec that is not accepted, everything stays as it is.
pub fn plan(observed: &Observed<'_>, active: &Active<'_>, memory: &mut Memory) -> Vec<Step> {
    if active.settings.is_err() {
        return Vec::new();
    }
    let mut steps = Vec::new();
    // First, and whatever becomes of its objects: pods may have stored something already.
    steps.extend(finalizers(active));
    let is_old = |at| observed.clock.duration_since(at) >= PASSWORD_EVERY;
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

/// The finalizer is there where the pool's objects go with it.
fn finalizers(active: &Active<'_>) -> Option<Step> {
    let pool = active.spec;
    let purges = job::purges(pool);
    (purges != held(pool)).then(|| {
        let mut finalizers = others(pool);
        finalizers.extend(purges.then(|| names::PURGE.to_owned()));
        Step::Finalizers(finalizers)
    })
}
