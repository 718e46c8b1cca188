"""Reports: the terminal table, the certificate, the step summary."""
