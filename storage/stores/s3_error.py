"""Maps S3 error codes and client exceptions to storage errors with advice and without credentials.

Source: Amazon S3 API reference, "Error responses"; Ceph and others use the same codes.
"""

import re

from storage.errors import ObjectMissing, StorageError, StoreRefused, StoreUnavailable

_MISSING = frozenset({"NoSuchKey", "404", "NoSuchUpload", "NoSuchVersion"})
_CONDITION_FAILED = frozenset({"PreconditionFailed", "412"})
_PERMISSIONS = (
    "allow these credentials s3:GetObject, PutObject, DeleteObject, ListBucket, AbortMultipartUpload, "
    "ListBucketMultipartUploads and ListMultipartUploadParts here, or use others"
)
_UNKNOWN_KEY = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE and AWS_ENDPOINT_URL"
_RENEW = "the credentials have expired or are not valid here: renew them and run the same command again"
_REGION = "set AWS_REGION to the bucket's region"
_NO_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
_BAD_NAME = "correct the bucket's name in --store"
_ADDRESS = "correct AWS_ENDPOINT_URL: it must be http(s)" + "://host[:port]"
_REFUSED = {
    "NoSuchBucket": "create the bucket, or name another one in --store",
    "InvalidBucketName": _BAD_NAME,
    "ParamValidationError": _BAD_NAME,
    "AccessDenied": _PERMISSIONS,
    "AllAccessDisabled": _PERMISSIONS,
    "403": _PERMISSIONS,
    "Forbidden": _PERMISSIONS,
    "InvalidAccessKeyId": _UNKNOWN_KEY,
    "SignatureDoesNotMatch": _UNKNOWN_KEY,
    "ExpiredToken": _RENEW,
    "InvalidToken": _RENEW,
    "TokenRefreshRequired": _RENEW,
    "RequestTimeTooSkewed": "set this machine's clock",
    "PermanentRedirect": _REGION,
    "301": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "InvalidRegionError": _REGION,
    "NoCredentialsError": _NO_CREDENTIALS,
    "PartialCredentialsError": _NO_CREDENTIALS,
    "CredentialRetrievalError": _RENEW,
    "TokenRetrievalError": _RENEW,
    "UnauthorizedSSOTokenError": _RENEW,
    "SSOTokenLoadError": _RENEW,
    "ProfileNotFound": "correct AWS_PROFILE, or unset it",
    "ConfigParseError": "correct the AWS configuration file",
    "NotImplemented": "this server cannot do what the store needs: choose another one",
    "501": "this server cannot do what the store needs: choose another one",
    "ValueError": _ADDRESS,
}
_USER_INFO = re.compile(r"(//)[^/@\s]*@")
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
    problem = strip_credentials(f"{where}: cannot {action}: {code}: {_message(error)}")
    if code in _REFUSED:
        return StoreRefused(f"{problem}; {_REFUSED[code]}")
    return StoreUnavailable(problem)


def error_code(error: BaseException) -> str:
    """Return the server's error code, or the exception's class name if no server answered."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict) and response.get("Error", {}).get("Code"):
            return str(response["Error"]["Code"])
    return type(error).__name__


def strip_credentials(text: str) -> str:
    """Remove user information in URLs and the values of signed queries."""
    return _SIGNED_QUERY.sub(r"\1…", _USER_INFO.sub(r"\1", text))


def _message(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    return " ".join(str(error).split()) or "no message"
