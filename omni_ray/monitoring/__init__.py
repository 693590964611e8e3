"""What is measured, as data, and what is made from it: dashboard, alert rules, Prometheus settings. Knows no Ray."""
