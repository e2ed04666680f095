package postgres_test

const envDSN = "HOLDFAST_POSTGRES_DSN"
