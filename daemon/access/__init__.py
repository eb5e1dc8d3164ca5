"""Who may do what: users of this machine, their rights, and the audit trail of changes."""
