"""Maps S3 error codes and client exceptions to storage errors with advice and without credentials.

Source: Amazon S3 API reference, "Error responses"; Ceph and others use the same codes.
"""

import re

from storage.errors import ObjectMissing, StorageError, StoreRefused, StoreUnavailable

_MISSING = frozenset({"NoSuchKey", "404", "NoSuchUpload", "NoSuchVersion"})
_CONDITION_FAILED = frozenset({"PreconditionFailed", "412"})
_ADVICE = {
    "create the bucket, or name another one in --store": "NoSuchBucket",
    "correct the bucket's name in --store": "InvalidBucketName ParamValidationError",
    "allow these credentials s3:GetObject, PutObject, DeleteObject, ListBucket, AbortMultipartUpload, "
    "ListBucketMultipartUploads and ListMultipartUploadParts here, or use others": (
        "AccessDenied AllAccessDisabled 403 Forbidden"
    ),
    "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE and AWS_ENDPOINT_URL": (
        "InvalidAccessKeyId SignatureDoesNotMatch"
    ),
    "the credentials have expired or are not valid here: renew them and run the same command again": (
        "ExpiredToken InvalidToken TokenRefreshRequired CredentialRetrievalError TokenRetrievalError "
        "UnauthorizedSSOTokenError SSOTokenLoadError"
    ),
    "set this machine's clock": "RequestTimeTooSkewed",
    "set AWS_REGION to the bucket's region": (
        "PermanentRedirect 301 AuthorizationHeaderMalformed IllegalLocationConstraintException InvalidRegionError"
    ),
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE": "NoCredentialsError PartialCredentialsError",
    "correct AWS_PROFILE, or unset it": "ProfileNotFound",
    "correct the AWS configuration file": "ConfigParseError",
    "this server cannot do what the store needs: choose another one": "NotImplemented 501",
    "correct AWS_ENDPOINT_URL: it must be http(s)" + "://host[:port]": "InvalidEndpoint EndpointResolutionError",
}
_REFUSED = {code: advice for advice, codes in _ADVICE.items() for code in codes.split()}
_USER_INFO = re.compile(r"(//)[^/@\s]*@")
_INVALID_ENDPOINT = ("Invalid endpoint: ", "Invalid IPv6 URL")
"""How the plain ValueErrors begin that botocore and urllib raise for an endpoint; any other one is a bug."""
_SIGNED_QUERY = re.compile(r"(?i)((?:x-amz-[a-z-]+|awsaccesskeyid|signature)=)[^&\s\"']+")


class ConditionFailed(StorageError):
    """The condition of a request was not met: with If-None-Match, the object exists."""


def convert_error(error: Exception, *, action: str, where: str) -> StorageError:
    """Return the storage error for an exception that the client raised during `action`."""
    code = error_code(error)
    if code in _CONDITION_FAILED:
        return ConditionFailed(f"{where}: cannot {action}: {code}")
    if code in _MISSING:
        return ObjectMissing(f"{where}: no such object")
    silence = "no answer in time" if isinstance(error, TimeoutError) else "no message"
    message = " ".join(str(error).split()) or silence
    problem = strip_credentials(f"{where}: cannot {action}: {code}: {message}")
    if code in _REFUSED:
        return StoreRefused(f"{problem}; {_REFUSED[code]}")
    return StoreUnavailable(problem)


def error_code(error: BaseException) -> str:
    """Return the server's error code, or the exception's class name if no server answered."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict) and response.get("Error", {}).get("Code"):
            return str(response["Error"]["Code"])
    if isinstance(error, ValueError) and str(error).startswith(_INVALID_ENDPOINT):
        return "InvalidEndpoint"
    return type(error).__name__


def strip_credentials(text: str) -> str:
    """Remove user information in URLs and the values of signed queries."""
    return _SIGNED_QUERY.sub(r"\1…", _USER_INFO.sub(r"\1", text))
