"""The workers of this node: fork, form, abort; exits, announcements to other agents, leaving."""
