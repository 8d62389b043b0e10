//! The shape of every answer: JSON, and errors in the one shape that the data path has too.

use axum::Json;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// 200 with `body`.
pub fn ok(body: Value) -> Response {
    Json(body).into_response()
}

/// An error: one sentence for the reader, one code for programs.
pub fn fault(status: StatusCode, message: &str) -> Response {
    let code = match status {
        StatusCode::BAD_REQUEST => "bad_request",
        StatusCode::UNAUTHORIZED => "unauthorized",
        StatusCode::FORBIDDEN => "forbidden",
        StatusCode::NOT_FOUND => "not_found",
        StatusCode::METHOD_NOT_ALLOWED => "method_not_allowed",
        StatusCode::UNPROCESSABLE_ENTITY => "reload_refused",
        _ => "admin_error",
    };
    let error = json!({"message": message, "type": "admin_error", "code": code});
    (status, Json(json!({"error": error}))).into_response()
}

/// Gives errors that the framework wrote (a path that is not UTF-8, a body over its limit) the shape of ours.
pub async fn in_shape(response: Response) -> Response {
    let status = response.status();
    let has_shape = response
        .headers()
        .get(CONTENT_TYPE)
        .is_some_and(|kind| kind == "application/json");
    if has_shape || !(status.is_client_error() || status.is_server_error()) {
        return response;
    }
    let reason = status.canonical_reason().unwrap_or("refused");
    fault(status, &format!("The request cannot be served: {reason}."))
}
