-- Writes what HAProxy has counted in its table of RPCs (see metrics.py) as Prometheus reads it. It runs for a scrape
-- only. HAProxy's Lua shows of an array of counters the first one alone, hence the way over the admin socket.

local socket_path, bounds_ms = ...

local FAMILIES = {
    {name = "requests_total", kind = "counter", help = "RPCs that have come in", field = "http_req_cnt"},
    {name = "in_flight", kind = "gauge", help = "RPCs without a whole answer yet", field = "conn_cur"},
    {name = "received_bytes_total", kind = "counter", help = "Bytes of clients", field = "bytes_in_cnt"},
    {name = "sent_bytes_total", kind = "counter", help = "Bytes to clients", field = "bytes_out_cnt"},
}
local STATUSES = {"CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"}

local function read_table()
    local socket = core.tcp()
    if not socket:connect("unix@" .. socket_path) then return {} end
    socket:send("show table triton-rpcs\n")
    local rows = {}
    for line in (socket:receive("*a") or ""):gmatch("[^\n]+") do
        local row = {}
        for name, value in line:gmatch("([%w_]+)=(%S+)") do row[name] = value end
        if row.key then
            row.rpc = row.key:match("([^/]+)$")
            rows[#rows + 1] = row
        end
    end
    socket:close()
    table.sort(rows, function(a, b) return a.key < b.key end)
    return rows
end

local function render(rows)
    local out = {}
    local function family(name, kind, help)
        out[#out + 1] = "# HELP triton_ingress_" .. name .. " " .. help .. "."
        out[#out + 1] = "# TYPE triton_ingress_" .. name .. " " .. kind
    end
    local function sample(name, labels, value)
        out[#out + 1] = "triton_ingress_" .. name .. "{" .. labels .. "} " .. value
    end
    for _, each in ipairs(FAMILIES) do
        family(each.name, each.kind, each.help)
        for _, row in ipairs(rows) do sample(each.name, 'rpc="' .. row.rpc .. '"', row[each.field]) end
    end
    family("failures_total", "counter", "RPCs that were refused before any message of an answer, by status")
    for _, row in ipairs(rows) do
        for code, name in ipairs(STATUSES) do
            local count = row["gpc" .. code]
            if count ~= "0" then sample("failures_total", 'rpc="' .. row.rpc .. '",status="' .. name .. '"', count) end
        end
    end
    family("first_byte_seconds", "histogram", "Time to the first byte of the answer")
    for _, row in ipairs(rows) do
        local index, count = #STATUSES + 1, 0
        for bound in bounds_ms:gmatch("[^,]+") do
            count = row["gpc" .. index]
            sample("first_byte_seconds_bucket", 'rpc="' .. row.rpc .. '",le="' .. tonumber(bound) / 1000 .. '"', count)
            index = index + 1
        end
        count = row["gpc" .. index]
        sample("first_byte_seconds_bucket", 'rpc="' .. row.rpc .. '",le="+Inf"', count)
        sample("first_byte_seconds_count", 'rpc="' .. row.rpc .. '"', count)
        sample("first_byte_seconds_sum", 'rpc="' .. row.rpc .. '"', tonumber(row["gpc" .. index + 1]) / 10000)
    end
    return table.concat(out, "\n") .. "\n"
end

core.register_service("triton_rpcs", "http", function(applet)
    local text = render(read_table())
    applet:set_status(200)
    applet:add_header("content-type", "text/plain; version=0.0.4")
    applet:add_header("content-length", tostring(#text))
    applet:start_response()
    applet:send(text)
end)
