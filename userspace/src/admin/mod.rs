//! The admin listener: how operators, orchestrators and Prometheus look at prefixlb, and steer it.
//!
//! It lives on the control plane's thread and reads atomics, so it answers at once whatever the workers are
//! doing, and no client of the data path can reach it. It stays open while the process drains: that is when
//! somebody wants to look.
//!
//! `/healthz` and `/readyz` are open to all, since orchestrators ask without a token and learn nothing but
//! yes or no; everything else wants the bearer token if one is set. Beyond loopback without a token the
//! listener refuses everything else, even if the configuration should have let that pass. And a web page in
//! the operator's browser can reach loopback too: without a token no order is taken from one.

mod answer;
mod policy;
mod ready;
mod status;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, ORIGIN};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use prefixlb_common::ledger::STATE_DRAINING;
use serde_json::json;
use tokio::net::TcpListener;

use crate::admin::answer::{fault, ok};
use crate::control::Control;
use crate::metrics::expose;
use crate::state::{Backend, Phase, Pool, Shared};

const ENDPOINTS: &str = "\
prefixlb admin
GET  /healthz                       the process is alive
GET  /readyz                        it takes requests
GET  /metrics                       for Prometheus
GET  /backends                      pools and backends, JSON
POST /backends/{pool}/{name}/drain    no new requests for this backend
POST /backends/{pool}/{name}/undrain  requests again
GET  /pools/{pool}/policy           the policy in force, JSON
PUT  /pools/{pool}/policy           change it; fields left out stay
POST /reload                        read the configuration file again
";

#[derive(Clone, Debug)]
struct Admin {
    shared: Arc<Shared>,
    control: Control,
    /// The listener can be reached from other machines.
    exposed: bool,
}

/// Serves the admin interface on `listener` until the process aborts.
pub async fn serve(listener: TcpListener, shared: Arc<Shared>, control: Control) {
    let exposed = !listener
        .local_addr()
        .is_ok_and(|addr: SocketAddr| addr.ip().to_canonical().is_loopback());
    let mut phase = shared.phase.subscribe();
    let app = router(Admin {
        shared: Arc::clone(&shared),
        control,
        exposed,
    });
    tokio::select! {
        ended = async { axum::serve(listener, app).await } => {
            tracing::error!(?ended, "the admin listener ended");
        }
        _ = phase.wait_for(|phase| *phase == Phase::Aborting) => {}
    }
}

fn router(admin: Admin) -> Router {
    let guard = middleware::from_fn_with_state(admin.clone(), authorise);
    Router::new()
        .route("/", get(async || ENDPOINTS))
        .route("/metrics", get(metrics))
        .route("/backends", get(backends))
        .route("/backends/{pool}/{name}/drain", post(drain))
        .route("/backends/{pool}/{name}/undrain", post(undrain))
        .route("/pools/{pool}/policy", get(read_policy).put(write_policy))
        .route("/reload", post(reload))
        .fallback(async || {
            fault(
                StatusCode::NOT_FOUND,
                "There is no such path; GET / lists them.",
            )
        })
        .method_not_allowed_fallback(wrong_method)
        .layer(guard)
        .route("/healthz", get(async || ok(json!({"status": "ok"}))))
        .route("/readyz", get(readyz))
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::map_response(answer::in_shape))
        .with_state(admin)
}

async fn wrong_method() -> Response {
    fault(
        StatusCode::METHOD_NOT_ALLOWED,
        "This path does not know that method; GET / lists what there is.",
    )
}

/// Lets a request pass if no token is set (on loopback), or if it carries the token.
async fn authorise(State(admin): State<Admin>, request: Request, next: Next) -> Response {
    let allowed = {
        let snapshot = admin.shared.snapshot.load();
        match &snapshot.settings.admin.token {
            Some(token) => bearer(request.headers()).is_some_and(|sent| same(sent, token)),
            None if admin.exposed => {
                return fault(
                    StatusCode::FORBIDDEN,
                    "The admin listener is reachable from other machines and has no token: set admin.token, or bind it to a loopback address.",
                );
            }
            None if from_a_browser(&request) => {
                return fault(
                    StatusCode::FORBIDDEN,
                    "Orders from a web page need a token: set admin.token, or use another client.",
                );
            }
            None => true,
        }
    };
    if allowed {
        return next.run(request).await;
    }
    let mut response = fault(
        StatusCode::UNAUTHORIZED,
        "Send the admin token as 'Authorization: Bearer TOKEN'.",
    );
    response.headers_mut().insert(
        "www-authenticate",
        axum::http::HeaderValue::from_static("Bearer"),
    );
    response
}

/// Browsers put `Origin` on every request of a page that can change something.
fn from_a_browser(request: &Request) -> bool {
    !request.method().is_safe() && request.headers().contains_key(ORIGIN)
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
}

/// Compares in a time that depends on the lengths alone, so that a guess learns nothing from how long it took.
fn same(sent: &[u8], token: &str) -> bool {
    let token = token.as_bytes();
    let differing = sent
        .iter()
        .zip(token)
        .fold(0u8, |seen, (a, b)| std::hint::black_box(seen | (a ^ b)));
    differing == 0 && sent.len() == token.len()
}

async fn metrics(State(admin): State<Admin>) -> Response {
    let page = expose::render(&admin.shared);
    ([(CONTENT_TYPE, expose::CONTENT_TYPE)], page).into_response()
}

async fn backends(State(admin): State<Admin>) -> Response {
    ok(status::backends(&admin.shared))
}

async fn readyz(State(admin): State<Admin>) -> Response {
    ready::answer(&admin.shared)
}

async fn reload(State(admin): State<Admin>) -> Response {
    match admin.control.reload().await {
        Ok(generation) => ok(json!({"generation": generation})),
        Err(why) => fault(StatusCode::UNPROCESSABLE_ENTITY, &why),
    }
}

async fn drain(State(admin): State<Admin>, Path(names): Path<(String, String)>) -> Response {
    set_draining(&admin.shared, &names, true)
}

async fn undrain(State(admin): State<Admin>, Path(names): Path<(String, String)>) -> Response {
    set_draining(&admin.shared, &names, false)
}

fn set_draining(shared: &Shared, (pool, name): &(String, String), draining: bool) -> Response {
    let (pool, backend) = match find_pool(shared, pool).and_then(|pool| {
        let backend = find_backend(&pool, name)?;
        Ok((pool, backend))
    }) {
        Ok(found) => found,
        Err(refused) => return *refused,
    };
    let cell = shared.ledger.cell(backend.slot);
    if draining {
        cell.state.fetch_or(STATE_DRAINING, Relaxed);
        backend.drop_pooled();
    } else {
        cell.state.fetch_and(!STATE_DRAINING, Relaxed);
        pool.waiters.wake_first();
    }
    tracing::info!(
        pool = pool.settings.name,
        backend = backend.settings.name,
        draining,
        "an operator changed a backend's draining"
    );
    ok(status::backend(shared, &pool, &backend))
}

async fn read_policy(State(admin): State<Admin>, Path(pool): Path<String>) -> Response {
    match find_pool(&admin.shared, &pool) {
        Ok(pool) => ok(policy::to_json(&pool.picker.policy())),
        Err(refused) => *refused,
    }
}

async fn write_policy(
    State(admin): State<Admin>,
    Path(pool): Path<String>,
    body: Bytes,
) -> Response {
    let pool = match find_pool(&admin.shared, &pool) {
        Ok(pool) => pool,
        Err(refused) => return *refused,
    };
    match policy::changed(&pool.picker.policy(), &body) {
        Ok(fresh) => {
            policy::put_in_force(&admin.shared, &pool, fresh);
            ok(policy::to_json(&pool.picker.policy()))
        }
        Err(why) => fault(StatusCode::BAD_REQUEST, &why),
    }
}

fn find_pool(shared: &Shared, name: &str) -> Result<Arc<Pool>, Box<Response>> {
    let snapshot = shared.snapshot.load();
    let found = snapshot
        .pools
        .iter()
        .find(|pool| pool.settings.name == name);
    found.cloned().ok_or_else(|| {
        let names = snapshot
            .pools
            .iter()
            .map(|pool| pool.settings.name.as_str());
        no_such("pool", name, names)
    })
}

fn find_backend(pool: &Pool, name: &str) -> Result<Arc<Backend>, Box<Response>> {
    let found = pool
        .backends
        .iter()
        .find(|backend| backend.settings.name == name);
    found.cloned().ok_or_else(|| {
        let names = pool.backends.iter().map(|b| b.settings.name.as_str());
        no_such("backend", name, names)
    })
}

fn no_such<'a>(what: &str, name: &str, names: impl Iterator<Item = &'a str>) -> Box<Response> {
    let names: Vec<&str> = names.collect();
    let message = format!(
        "There is no {what} named {name:?}; there are: {}.",
        names.join(", ")
    );
    Box::new(fault(StatusCode::NOT_FOUND, &message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_the_same_or_not() {
        assert!(same(b"secret", "secret"));
        for other in ["", "secre", "secret ", "Secret", "secrets"] {
            assert!(!same(other.as_bytes(), "secret"), "{other:?}");
        }
    }
}
