-- Reads the id of the sequence that an inference request belongs to, and sets txn.sequence: "+" and the id, "?" when it
-- cannot be read here, or nothing when there is none. To Triton 0 and "" are no sequence, and text ends at a NUL.

-- Fields of ModelInferRequest, of an entry of its map `parameters`, and of InferParameter.
local PARAMETERS = 4
local KEY, VALUE = 1, 2
local INT64, STRING, UINT64 = 2, 3, 5

local VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

-- A body of up to here is a whole one: HAProxy's buffer, which it did not fill, has room for more.
local SURELY_BUFFERED = 15000

local function varint(text, at)
    local value, shift = 0, 0
    while shift < 70 do
        local byte = string.byte(text, at)
        if not byte then return nil end
        at = at + 1
        if shift < 64 then value = value | (byte & 0x7F) << shift end
        if byte < 0x80 then return value, at end
        shift = shift + 7
    end
    return nil
end

-- Yields number, wire type, and the integer or the place of the first and last byte of each field; of one that is cut
-- off, nil for these. Ends at what is no field.
local function fields(text, at)
    return function()
        local tag
        tag, at = varint(text, at)
        if not tag then return nil end
        local number, kind = tag >> 3, tag & 7
        local size
        if kind == VARINT then
            local value
            value, at = varint(text, at)
            if not value then at = #text + 1 end
            return number, kind, value
        elseif kind == LENGTH then
            size, at = varint(text, at)
        elseif kind == FIXED64 then
            size = 8
        elseif kind == FIXED32 then
            size = 4
        end
        if not size or size < 0 or at + size - 1 > #text then
            at = #text + 1
            return number, kind, nil
        end
        local first = at
        at = at + size
        return number, kind, first, at - 1
    end
end

local function unsigned(value)
    if value >= 0 then return tostring(value) end
    local tens = (value >> 1) // 5
    return tostring(tens) .. tostring(value - tens * 10)
end

local function id_of(parameter)
    local id = ""
    for number, kind, value, last in fields(parameter, 1) do
        if (number == INT64 or number == UINT64) and kind == VARINT and value then
            id = value == 0 and "" or unsigned(value)
        elseif number == STRING and kind == LENGTH and value then
            id = string.match(string.sub(parameter, value, last), "^[^\0]*")
        else
            id = ""
        end
    end
    return id
end

local function grpc_sequence(body)
    local compressed, length = string.byte(body, 1), #body >= 5 and string.unpack(">I4", body, 2) or 0
    if compressed ~= 0 then return "?" end
    local id, past = "", false
    for number, kind, first, last in fields(body, 6) do
        past = past or number > PARAMETERS
        if number == PARAMETERS and kind == LENGTH and first then
            local entry, key, value = string.sub(body, first, last), "", ""
            for part, part_kind, part_first, part_last in fields(entry, 1) do
                if part_kind == LENGTH and part_first then
                    local text = string.sub(entry, part_first, part_last)
                    if part == KEY then key = text elseif part == VALUE then value = id_of(text) end
                end
            end
            if key == "sequence_id" then id = value end
        end
    end
    if id ~= "" then return "+" .. id end
    return not past and length + 5 > #body and "?" or nil
end

local function http_sequence(body, head, encoding, length)
    if encoding and encoding ~= "identity" then return "?" end
    local json = head and string.sub(body, 1, head) or body
    local id, count = "", 0
    -- Nothing else in a request is expected to have a key of this name.
    for at in string.gmatch(json, '"sequence_id"%s*:%s*()') do
        id, count = string.match(json, '^"([^"]*)"', at) or string.match(json, "^[%w.+-]*", at), count + 1
    end
    if count > 1 then return "?" end
    if count == 1 then return id ~= "" and id ~= "0" and "+" .. id or nil end
    local size = head or length or (#body > SURELY_BUFFERED and #body + 1 or 0)
    return size > #body and "?" or nil
end

local function set(txn, sequence)
    if sequence then txn:set_var("txn.sequence", sequence) end
end

core.register_action("grpc_sequence", {"http-req"}, function(txn)
    set(txn, grpc_sequence(txn.f:req_body() or ""))
end)

core.register_action("http_sequence", {"http-req"}, function(txn)
    set(txn, http_sequence(
        txn.f:req_body() or "",
        tonumber(txn.f:req_hdr("inference-header-content-length") or ""),
        txn.f:req_hdr("content-encoding"),
        tonumber(txn.f:req_hdr("content-length") or "")
    ))
end)
