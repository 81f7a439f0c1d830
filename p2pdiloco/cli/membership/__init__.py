"""Commands about membership: invite, ban, revoke, admit, can-join."""
